"""A plan written as JSON is read back as the job it describes; a wrong one is told where."""

import json

import pytest

from megatron_switch.architecture.model_flags import model_from_flags, read_model
from megatron_switch.errors import ConfigError, LayoutError
from megatron_switch.layout.workload import Training
from megatron_switch.planner.hardware.cluster import load_hardware
from megatron_switch.planner.plan_file import plans_as_json, read_plan
from megatron_switch.planner.plan_flags import plan_flags
from megatron_switch.planner.request import PlanRequest
from megatron_switch.planner.search import find_plans


@pytest.fixture(scope="module")
def written():
    request = PlanRequest(
        model=model_from_flags(read_model("switch-base-128")),
        training=Training(seq_length=512, global_batch_size=256),
        hardware=load_hardware("h100-80gb-ndr"),
        nodes=2,
    )
    plans = find_plans(request, count=2).best
    return plans, plans_as_json(plans, request, ["--switch-model", "switch-base-128"])


@pytest.fixture
def path(tmp_path, written):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(written[1], indent=1))
    return path


@pytest.mark.parametrize("number", [1, 2])
def test_a_plan_comes_back(path, written, number):
    job = read_plan(path, world_size=16, number=number)
    plan = written[0][number - 1]
    assert (job.nodes, job.gpus_per_node, job.world_size) == (2, 8, 16)
    words = ["--switch-model", "switch-base-128", *plan_flags(plan.layout, plan.training)]
    assert list(job.flags) == words
    assert job.expert_nodes == max(1, plan.layout.ep * plan.layout.etp // 8)
    assert (job.expert_leaves, job.gpu) == (1, "h100-80gb-ndr")


def test_memory_and_seconds_are_those_of_the_plan(written):
    plans, content = written
    entry = content["plans"][0]
    assert entry["memory_bytes"]["total"] == plans[0].memory.total
    assert entry["seconds"]["step"] == plans[0].timing.step
    assert entry["layout"]["edp"] == plans[0].layout.edp
    assert entry["lower_bound"] is True


def test_a_plan_for_another_number_of_ranks(path):
    with pytest.raises(
        LayoutError, match=r"is for 16 ranks \(2 nodes x 8 GPUs\), but the job has 32\."
    ):
        read_plan(path, world_size=32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda c: c.update(nodes=3),
            LayoutError,
            r"line \d+, key 'plans.*world_size': 16 ranks do",
        ),
        (lambda c: c.update(nodes="2"), ConfigError, r"line 3, key 'nodes': expected a whole num"),
        (lambda c: c.update(schema="x/1"), ConfigError, r"key 'schema': expected 'megatron-switch"),
        (lambda c: c.update(plans=[]), ConfigError, r"key 'plans': holds 0 plans, and number 1"),
        (
            lambda c: c.update(plans=[7]),
            ConfigError,
            r"key 'plans': expected a list of objects, found",
        ),
        (lambda c: c["plans"][0].pop("flags"), ConfigError, r"lacks the key 'flags' in 'plans.0'"),
        (
            lambda c: c["plans"][0].update(flags=["--a", 1]),
            ConfigError,
            r"key 'plans.0.flags': expected a list of texts",
        ),
    ],
)
def test_a_malformed_plan_is_told_with_line_and_key(tmp_path, written, change, error, message):
    content = json.loads(json.dumps(written[1]))
    change(content)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content, indent=1))
    with pytest.raises(error, match=message):
        read_plan(path)


def test_a_missing_plan(tmp_path):
    with pytest.raises(ConfigError, match=r"The plan file .* cannot be read"):
        read_plan(tmp_path / "absent.json")
