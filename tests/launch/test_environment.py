"""Environment variables follow from GPU generation and flags."""

import pytest
from support.launch_job import job

from megatron_switch.errors import ConfigError
from megatron_switch.launch.environment import environment_of, generation_of
from megatron_switch.planner.hardware.cluster import load_hardware, preset_names

TP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


def values(generation, *flags):
    return {each.name: each.value for each in environment_of(job(*flags), generation)}


def test_every_preset_has_a_generation():
    found = {name: generation_of(load_hardware(name).gpu) for name in preset_names()}
    assert found == {
        "a100-80gb-hdr": "ampere",
        "b200": "blackwell",
        "h100-80gb-ndr": "hopper",
        "h200-ndr": "hopper",
    }


@pytest.mark.parametrize(("gpu", "generation"), [("GB300 NVL72", "blackwell"), ("GH200", "hopper")])
def test_generations_of_other_names(gpu, generation):
    assert generation_of(gpu) == generation


def test_an_unknown_gpu_asks_for_its_generation():
    with pytest.raises(ConfigError, match=r"'V100', is unknown; .* Set --generation ampere"):
        generation_of("V100")


@pytest.mark.parametrize(
    ("generation", "flags", "connections"),
    [
        ("ampere", (), None),
        ("ampere", TP, "1"),
        ("hopper", TP, "1"),
        ("blackwell", TP, None),
        ("hopper", (*TP, "--use-megatron-fsdp"), None),
        ("blackwell", ("--overlap-moe-expert-parallel-comm",), "32"),
    ],
)
def test_queues_of_kernels(generation, flags, connections):
    assert values(generation, *flags).get("CUDA_DEVICE_MAX_CONNECTIONS") == connections


def test_nvlink_sharp_is_off_where_it_exists():
    assert "NCCL_NVLS_ENABLE" not in values("ampere")
    assert values("hopper")["NCCL_NVLS_ENABLE"] == "0"


def test_offloading_of_activations_has_the_variable_that_megatron_asks_for():
    assert values("hopper", "--fine-grained-activation-offloading")["NVTE_CPU_OFFLOAD_V1"] == "1"
    assert "NVTE_CPU_OFFLOAD_V1" not in values("hopper")


def test_margins_go_with_overlapped_gradients():
    margins = {"NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN"}
    assert margins <= values("hopper", "--overlap-grad-reduce").keys()
    assert not margins & values("hopper").keys()


def test_every_variable_has_a_reason_that_fits_a_line():
    flags = (*TP, "--overlap-grad-reduce", "--fine-grained-activation-offloading")
    for each in environment_of(job(*flags), "hopper"):
        assert 0 < len(each.reason) <= 98, each
