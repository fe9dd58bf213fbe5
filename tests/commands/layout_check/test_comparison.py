"""The check finds equal layouts equal, and names what differs in a wrong one.

Cases train in forked ranks. Tests that do are few and small; the quick check is one of them.
"""

import json

import pytest
import torch

from megatron_switch.cli import main
from megatron_switch.commands.layout_check import comparison
from megatron_switch.commands.layout_check.cases import MEANINGS, SETTINGS, Case
from megatron_switch.commands.layout_check.comparison import check_layouts, check_on_cpu
from megatron_switch.commands.layout_check.values import TOLERANCE
from megatron_switch.commands.table import parse
from megatron_switch.errors import ConfigError
from megatron_switch.layout.grid import Layout

PLAIN = {factor: next(iter(values)) for factor, values in {**MEANINGS, **SETTINGS}.items()}
EXPERTS_APART = Case(Layout(2, ep=2), PLAIN, 4)


def check(case, fault=lambda chunks: None):
    (result,) = check_on_cpu([case], lambda result: None, fault=fault)
    return result


def scale_a_router(chunks):
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("layers.1.mlp.router.weight"):
                parameter.main_grad.mul_(2.0)


def forget_an_expert(chunks):
    """Leave an expert on the second rank without a gradient."""
    if torch.distributed.get_rank() == 1:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith("layers.2.mlp.experts.weight2"):
                    parameter.main_grad[1].zero_()


def fail_on_one_rank(chunks):
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("this rank is broken")


@pytest.mark.slow
def test_a_scaled_gradient_is_found_with_what_follows_from_it():
    result = check(EXPERTS_APART, scale_a_router)
    wrong = result.verdict.wrong
    name = "gradient 1 of decoder.layers.1.mlp.router.weight"
    assert wrong[name] == pytest.approx(1.0, rel=1e-4)
    assert "norm of step 1" in wrong
    assert any(name.startswith("parameter of ") for name in wrong)
    assert result.verdict.deviation["loss of step 1"] <= TOLERANCE
    assert "gradient 1 of decoder.layers.2.mlp.router.weight" not in wrong


@pytest.mark.slow
def test_one_experts_gradient_is_told_apart_from_the_others():
    wrong = check(EXPERTS_APART, forget_an_expert).verdict.wrong
    weights = "decoder.layers.2.mlp.experts.experts.linear_fc2.weight"
    first = {name for name in wrong if name.startswith("gradient 1 ")}
    assert first == {f"gradient 1 of {weights}[5]"}  # four experts a rank
    assert wrong[f"gradient 1 of {weights}[5]"] == pytest.approx(1.0)


@pytest.mark.slow
def test_a_case_that_fails_takes_nothing_with_it(capfd):
    one = Case(Layout(1), PLAIN, 4)
    failed, passed = check_on_cpu([EXPERTS_APART, one], lambda result: None, fault=fail_on_one_rank)
    assert failed.verdict is None
    assert "a rank failed" in failed.error
    assert "this rank is broken" in capfd.readouterr().err
    assert passed.equal


@pytest.mark.parametrize("code", [130, 143])
def test_a_signal_ends_the_check_and_not_one_case(monkeypatch, code):
    monkeypatch.setattr(comparison, "import_megatron", lambda: None)
    monkeypatch.setattr(comparison, "launch", lambda num_ranks, target: code)
    with pytest.raises(SystemExit, match=str(code)):
        check_on_cpu([EXPERTS_APART], lambda result: None)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_check_finds_every_layout_equal(capfd):
    code = main(["check-layouts", "--quick", "--json"])
    records = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [record for record in records if not record["equal"]] == []
    assert code == 0
    assert {record["ranks"] for record in records} == {1, 2, 4}
    assert len(records) > 30


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--max-ranks", "0"], {}, "--max-ranks is at least 1, got 0"),
        (["--device", "cuda"], {}, "WORLD_SIZE is not set. Start it with torchrun"),
        ([], {"WORLD_SIZE": "1"}, r"\(WORLD_SIZE is 1\). Start check-layouts without torchrun"),
        (["--device", "cuda"], {"WORLD_SIZE": "3"}, "on 1, 2, 4, 8 ranks, got 3"),
    ],
)
def test_what_cannot_be_checked_is_refused(monkeypatch, words, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        check_layouts(parse("check-layouts", words))
