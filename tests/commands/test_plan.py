"""``megatron-switch plan`` prints plans that the training command accepts."""

import json
import re

import pytest

from megatron_switch.architecture.layer_pattern import stacks_of
from megatron_switch.cli import main
from megatron_switch.config import SwitchConfig
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Training
from megatron_switch.planner.memory_saving import SAVINGS
from megatron_switch.planner.plan_file import read_plan
from megatron_switch.planner.plan_flags import PLANNED_FLAGS, plan_flags
from megatron_switch.training.arguments.parser import parse_command_line
from megatron_switch.training.preflight.layout import check_layout

PLAN = "plan --model gpt-1.6t-128 --nodes 128 --global-batch-size 2048"
OWN = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 "
    "--max-position-embeddings 256 --vocab-size 1000 --num-experts 8 --disable-bias-linear "
    "--lr 1e-3"
)


def plan(capsys, text, code=0):
    assert main(text.split()) == code
    printed = capsys.readouterr()
    return printed.out if code == 0 else printed.err


def test_the_best_layouts_come_with_reasons_warnings_and_flags(capsys):
    text = plan(capsys, PLAN)
    assert "gpt-1.6t-128: 1675.48B parameters, 39.10B active" in text
    assert "128 nodes x 8 = 1024 GPUs" in text
    assert "more kept tokens a second" in text
    assert "bound by" in text
    assert "warning: Even a balanced router drops 2.3%" in text
    assert "--switch-model gpt-1.6t-128 --tensor-model-parallel-size" in text
    assert "Times are estimates" in text


def test_json_is_a_plan_file(capsys, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan(capsys, f"{PLAN} --json --count 2"))
    assert len(json.loads(path.read_text())["plans"]) == 2
    job = read_plan(path, world_size=1024)
    assert job.flags[:2] == ("--switch-model", "gpt-1.6t-128")


def test_where_gb_is_not_the_sum_of_its_parts_a_line_says_why(capsys):
    command = "plan --model gpt-1.6t-128 --nodes 64 --count 2"
    memories = [
        each["memory_bytes"] for each in json.loads(plan(capsys, f"{command} --json"))["plans"]
    ]
    assert all(each["total"] != in_a_pass(each) for each in memories)
    needs = ", ".join(f"{each['step'] / 1e9:.1f}" for each in memories)
    line = (
        f"In layouts 1, 2 the peak is the optimizer's step, which needs {needs} GB in place of act "
        "and buffer."
    )
    assert line in plan(capsys, command).splitlines()
    other = plan(capsys, "plan --model gpt-1.6t-128 --nodes 128 --count 1")
    assert "the peak is the optimizer's step" not in other


def in_a_pass(memory):
    """Return the sum of the parts that a table of plans shows."""
    state = memory["expert_state"] + memory["dense_state"]
    kept = memory["activations"] + memory["routing"]
    return state + kept + max(memory["buffers"], memory["logits"])


@pytest.mark.slow
def test_planned_flags_pass_the_products_own_checks(capsys, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text(plan(capsys, f"{PLAN} --json --count 3"))
    monkeypatch.setenv("WORLD_SIZE", "1024")
    for number in (1, 2, 3):
        flags = read_plan(path, number=number).flags
        line = parse_command_line(flags)
        line.args.moe_layer_freq = line.args.moe_layer_freq or [0, 1] * 24
        layout = check_layout(line.args, SwitchConfig.from_args(line.args))
        entry = json.loads(path.read_text())["plans"][number - 1]
        assert layout.given()["ep"] == entry["layout"]["ep"]
        assert (layout.dp, layout.edp) == (entry["layout"]["dp"], entry["layout"]["edp"])
        assert len(stacks_of(line.args)["decoder"].sparse_layers) == 24
        assert line.args.num_experts == 128


@pytest.mark.slow
@pytest.mark.parametrize("saving", [saving for row in SAVINGS for saving in row])
def test_every_saving_is_made_of_flags_that_exist(saving):
    plain = Training(seq_length=64, micro_batch_size=2, global_batch_size=64, dispatch="packed")
    training = saving.applied_to(plain)
    layout = Layout(16, tp=2, pp=2, vp=2, cp=2, ep=2, etp=1)
    words = plan_flags(layout, training)
    args = parse_command_line(words).args
    assert (args.tensor_model_parallel_size, args.context_parallel_size) == (2, 2)
    assert args.num_virtual_stages_per_pipeline_rank == 2
    assert args.use_megatron_fsdp == (saving.sharding == "fully_sharded")
    assert args.optimizer_cpu_offload == saving.offload
    granularity = {"none": None, "moe": "selective", "full": "full"}[saving.recompute]
    assert args.recompute_granularity == granularity
    assert args.sequence_parallel
    assert args.bf16
    assert {word[2:] for word in words if word.startswith("--")} <= PLANNED_FLAGS


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["switch-base-128", "switch-large-128", "switch-xxl-128", "switch-c-2048"]
)
def test_named_models_parse_in_training_too(name):
    args = parse_command_line(["--switch-model", name, "--lr", "1e-3"]).args
    assert args.switch_arch == "t5"
    assert args.num_experts == (2048 if name == "switch-c-2048" else 128)
    override = parse_command_line(["--switch-model", name, "--num-experts", "8"]).args
    assert override.num_experts == 8


def test_the_pretrain_flags_themselves_are_a_model(capsys):
    text = plan(capsys, f"plan --nodes 1 --count 1 -- {OWN} --tensor-model-parallel-size 2")
    assert "pretrain flags: 0.0" in text
    assert f"{OWN.split(' --lr')[0]} --lr 1e-3 --tensor-model-parallel-size 2" in text.replace(
        " \\\n ", ""
    )
    assert text.count("--tensor-model-parallel-size") == 1


def test_flags_change_a_named_model(capsys):
    text = plan(capsys, f"{PLAN} --count 1 -- --num-experts 64 --switch-dispatch padded")
    assert "--switch-model gpt-1.6t-128 --num-experts 64" in text.replace("\\\n  ", "")
    assert "padded" in text


def test_a_json_file_is_a_model(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps({"num_layers": 4, "hidden-size": 256, "num-attention-heads": 4,
                    "seq-length": 64, "max-position-embeddings": 64, "vocab-size": 500})
    )  # fmt: skip
    assert f"{path}: 0.00B parameters" in plan(capsys, f"plan --model {path} --count 1")


def test_explain_shows_formulas(capsys):
    text = plan(capsys, f"{PLAN} --explain")
    assert "floor(2048 x 1.25 / 128), at least 4" in text
    assert "24 sparse layers x 128 x 2 x 8192 x 32768" in text
    assert "two-level, for comparison" in text
    assert "at the peak" in text
    err = plan(capsys, f"{PLAN} --count 1 --explain 2", code=2)
    assert "--explain 2 asks for a layout that is not among the 1 shown" in err


def test_explain_without_a_number_shows_the_given_run(capsys):
    flags = f"{OWN} --bf16 --micro-batch-size 2 --global-batch-size 64"
    text = plan(capsys, f"plan --explain -- {flags}")
    assert "The run of these flags as 'train' starts it" in text
    assert "TP1 PP1 EP1 ETP1" in text.splitlines()
    assert "padded dispatch" in text  # as on GPUs
    assert "batch    64 sequences" in text
    fastest = plan(capsys, f"plan --explain 1 -- {flags}")
    assert "The run of these flags" not in fastest
    assert "TP1 PP1 EP1 ETP1" not in fastest.splitlines()
    large = plan(capsys, f"{PLAN} --explain -- --bf16")
    assert re.search(
        r"It does not fit: [\d.,]+ GB of 83\.0 GB\. Layouts that do: .*--explain", large
    )


def test_given_flags_that_a_plan_decides_otherwise_are_named(capsys):
    given = "--recompute-granularity full --micro-batch-size 2 --use-distributed-optimizer"
    text = plan(capsys, f"plan --count 1 -- {OWN} {given}")
    assert "note: The first layout does not have --recompute-granularity full: " in text
    record = json.loads(plan(capsys, f"plan --count 1 --json -- {OWN} {given}"))
    assert record["not_kept"] == ["--recompute-granularity full"]
    assert "note:" not in plan(capsys, f"plan --count 1 -- {OWN} --micro-batch-size 2")


@pytest.mark.parametrize(
    ("own", "flags"),
    [
        ("--train-tokens 3.2768B", ""),
        ("", "--train-samples 12800000"),
        ("", "--train-iters 200000 --global-batch-size 64"),
    ],
)
def test_the_whole_training_has_a_time_and_gpu_hours(capsys, own, flags):
    command = f"plan --count 1 {own}"
    record = json.loads(plan(capsys, f"{command} --json -- {OWN} {flags}"))
    (first,) = record["plans"]
    assert record["train_tokens"] == 3_276_800_000
    seconds = 3_276_800_000 / first["tokens_per_second_per_gpu"] / 8
    assert first["training_seconds"] == pytest.approx(seconds)
    assert first["training_gpu_hours"] == pytest.approx(seconds * 8 / 3600)
    text = plan(capsys, f"{command} -- {OWN} {flags}")
    assert "3.277B tokens take, without evaluation and saving: " in text
    assert f"{first['training_gpu_hours']:,.0f} GPU hours" in text


@pytest.mark.slow
def test_sweep_of_capacity_factors(capsys):
    text = plan(capsys, f"{PLAN} --sweep-capacity")
    rows = [
        line.split() for line in text.splitlines() if line[:6].strip().replace(".", "").isdigit()
    ]
    factors = [float(row[0]) for row in rows]
    slots = [int(row[1]) for row in rows]
    drops = [float(row[2].rstrip("%")) for row in rows]
    assert factors == sorted(factors)
    assert slots == sorted(slots)
    assert drops == sorted(drops, reverse=True)
    assert (factors[0], slots[0]) == (1.0, 16)


def test_the_popular_example_is_answered_literally(capsys):
    text = plan(capsys, "plan --model gpt-1.6t-128 --grid 32x4x8 --global-batch-size 2048")
    assert "dense grid:  TP 4 x CP 1 x PP 1 x DP 256 = 1024 ranks" in text
    assert "expert grid: ETP 4 x EP 8 x PP 1 x EDP 32 = 1024 ranks" in text
    assert "328.6 + 39.8 = 368.3 GB: does not fit" in text
    assert "29.0 + 0.5 = 29.5 GB: fits" in text
    assert "Nearest layouts that fit with the distributed optimizer alone" in text
    assert "--use-megatron-fsdp" in text


def test_a_grid_of_other_ranks_is_refused(capsys):
    err = plan(capsys, "plan --model gpt-1.6t-128 --grid 32x4x8 --nodes 64", code=2)
    assert "--grid 32x4x8 is 1024 ranks, but 64 nodes x 8 GPUs are 512" in err


@pytest.mark.slow
def test_topology_orders_nodes(capsys, tmp_path):
    topology = tmp_path / "topology.conf"
    topology.write_text(
        "SwitchName=a Nodes=n[1-3]\nSwitchName=b Nodes=n[4-8]\nSwitchName=c Nodes=n[9-16]\n"
    )
    hosts = tmp_path / "hosts"
    text = plan(
        capsys,
        "plan --model gpt-1.6t-128 --nodes 16 --hardware b200 --global-batch-size 512 --count 1 "
        f"--topology {topology} --write-hostfile {hosts}",
    )
    assert "Expert groups under one leaf switch:" in text
    lines = hosts.read_text().split()
    assert len(lines) == 128
    assert set(lines) == {f"n{i}" for i in range(1, 17)}
    err = plan(capsys, f"{PLAN} --topology {topology}", code=2)
    assert "names 16 nodes and the plan is for 128" in err


@pytest.mark.slow
def test_fit_reads_measurements_and_writes_hardware(capsys, tmp_path):
    output = tmp_path / "nccl.txt"
    ranks = [f"#  Rank {r} Group 0 Pid 1 on host{r // 8} device {r % 8} [0x1] X" for r in range(16)]
    rows = [
        f"{size} {size // 4} float none -1 {20 + size * 8 / 16 / 20e3:.2f} 1 1 0 1 1 1 0"
        for size in (8192, 1 << 20, 1 << 27)
    ]
    output.write_text("\n".join(["# alltoall_perf -b 8K", *ranks, *rows]) + "\n")
    fitted = tmp_path / "mine.json"
    text = plan(
        capsys, f"{PLAN} --count 1 --fit {output} --measured-step 9.5 --write-hardware {fitted}"
    )
    assert "Times are fitted to measurements" in text
    content = json.loads(fitted.read_text())
    assert content["network"]["alltoall_gb_s"] == pytest.approx(20, rel=0.02)
    again = plan(capsys, f"{PLAN} --count 1 --hardware {fitted}")
    assert " 9.5 " in again


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan --nodes 2", "There is no model to plan"),
        ("plan --model gpt-9", "gpt-9 is neither"),
        ("plan --model gpt-1.6t-128 --hardware v100", "v100 is neither"),
        ("plan --model gpt-1.6t-128 --nodes 8", "fits in none of"),
        (f"plan -- {OWN} --tensor-model-parallel-size 3", "3 does not divide 8"),
        (f"plan -- {OWN} --switch-dispatch fast", "--switch-dispatch is auto, packed or padded"),
        (f"plan -- {OWN} --hidden-dropout x", "--hidden-dropout takes a finite number, got x"),
        (f"plan -- {OWN} --hidden-dropout 1.5", "--hidden-dropout must be at least 0 and below 1"),
        (f"plan --global-batch-size 8 -- {OWN} --context-parallel-size 2", "Transformer Engine"),
    ],
)
def test_mistakes_end_with_their_message(capsys, words, message):
    assert message in plan(capsys, words, code=2)


@pytest.mark.parametrize("words", ["plan --nodes 0", "plan --nodes two", "plan --what"])
def test_mistakes_of_use(words):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())


@pytest.mark.parametrize("flag", ["--write-hardware", "--write-hostfile"])
def test_a_file_in_a_folder_that_does_not_exist_is_refused_first(capsys, tmp_path, flag):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--model", "gpt-1.6t-128", flag, str(tmp_path / "gone" / "file")])
    assert f"argument {flag}: is in the folder '{tmp_path / 'gone'}', which does not exist" in (
        capsys.readouterr().err
    )
