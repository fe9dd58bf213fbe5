"""The bench compares layers that compute the same, and says what it measured: never how fast.

The layers themselves are checked by the bench before it times them; here it is shown that this
check finds what is wrong, and that counts, ratios and tables are right. All sizes are tiny.
"""

import importlib.metadata as metadata
import importlib.util
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import bench_layer
import pytest
import torch
from bench import layers
from bench.accumulate import GradientBuffers
from bench.candidate import Candidate
from bench.check import check
from bench.floors import build_plain, plain_layer, plain_routing
from bench.measure import PHASES, Pass, phases_ms, time_all
from bench.memory import memory_of
from bench.problem import BenchError, Problem, Sizes
from bench.report import INSIDE_COLUMNS, TIME_COLUMNS, CaseResult, Row
from bench.run_case import NAMES, Passes, run_case
from torch import nn

from megatron_switch.moe.reference import switch_layer
from megatron_switch.testing.ranks import run_ranks

TINY = Sizes(experts=4, total_tokens=48, width=8, ffn=16, capacity_factor=0.75, threads=1)
ONCE = Passes(rounds=1, warmup=0)
FLOORS = {"floor: dense", "floor: padded"}
INSTALLED = {name for name in NAMES if layers.missing_package(name) is None}


def test_the_plain_layer_is_the_paper_s():
    problem = Problem(TINY)
    leaves = [problem.tokens_of(0), problem.router_ED, problem.wi_eFD, problem.wo_eDF]
    ours = [leaf.clone().requires_grad_() for leaf in leaves]
    theirs = [leaf.clone().requires_grad_() for leaf in leaves]
    routing = plain_routing(ours[0], ours[1], TINY.capacity)
    y_TD = plain_layer(ours[0], routing, *ours[2:])
    expected_TD = switch_layer(*theirs, capacity=TINY.capacity)
    assert 0 < routing.kept_T.sum() < TINY.tokens
    torch.testing.assert_close(y_TD, expected_TD)
    for value in (y_TD, expected_TD):
        value.backward(problem.output_gradient_of(0))
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


@pytest.mark.parametrize(
    ("sizes", "left_out"),
    [
        (TINY, set()),
        (replace(TINY, world=2), set(layers.ONE_RANK)),
        (replace(TINY, without_experts=True), set()),
        (replace(TINY, dtype="bfloat16"), set()),
        (replace(TINY, accumulate=True), set()),
    ],
    ids=["experts", "two ranks", "without experts", "bfloat16", "accumulated"],
)
def test_every_installed_layer_is_checked_and_measured(sizes, left_out):
    result = run_case(sizes, ONCE)
    assert 0 < result.kept_tokens < result.tokens == sizes.tokens
    measured = {row.name: row for row in result.rows if row.minimum_ms is not None}
    floors = {"floor: router"} if sizes.without_experts else FLOORS
    assert set(measured) == (INSTALLED - left_out) | floors
    assert {row.name for row in result.rows} == set(NAMES) | floors
    for name, row in measured.items():
        assert (row.error is None) == (name in floors)
        assert row.peak_bytes >= row.kept_bytes >= row.kept_outside_bytes >= 0


def problem_of(experts=TINY.experts, **changes):
    return Problem(replace(TINY, experts=experts, **changes))


def on_one_rank(worker):
    """Run a check where there is a process group, as there is when the bench runs."""
    run_ranks(worker, 1)


def test_a_layer_that_computes_something_else_is_named():
    on_one_rank(_check_wrong_values)


def _check_wrong_values(rank):
    problem = problem_of()
    plain = build_plain(problem)
    assert check(plain, problem).kept == int(
        plain_routing(problem.tokens_of(0), problem.router_ED, TINY.capacity).kept_T.sum()
    )
    wrong = replace(plain, forward=lambda x_TD: 1.01 * plain.forward(x_TD))
    with pytest.raises(BenchError, match=r"differs .* in the output by 1\.0e-02, .* 3e"):
        check(wrong, problem)
    ungated = replace(plain, forward=lambda x_TD: plain.forward(x_TD.detach()) + 0 * x_TD)
    with pytest.raises(BenchError, match=r"differs .* in the tokens' gradient by 1\.0e\+00"):
        check(ungated, problem)
    idle = replace(plain, wi=[torch.zeros_like(plain.wi[0])])
    with pytest.raises(BenchError, match="in the first matrices' gradient by "):
        check(idle, problem)


def test_a_layer_that_drops_others_than_it_says_is_named():
    on_one_rank(_check_wrong_drops)


def _check_wrong_drops(rank):
    problem = problem_of()
    plain = build_plain(problem)
    with pytest.raises(BenchError, match=r"drop by 'probability', and \d+ tokens are otherwise"):
        check(replace(plain, drops="probability"), problem)
    check(replace(plain, drops="any"), problem)
    one_less = replace(
        plain,
        drops="any",
        forward=lambda x_TD: plain.forward(x_TD) * (torch.arange(len(x_TD)) > 0).unsqueeze(1),
    )
    with pytest.raises(BenchError, match="and 1 experts keep another number of tokens otherwise"):
        check(one_less, problem)


def test_rounds_are_interleaved_and_rotate():
    calls = []

    def candidate(name):
        def forward(x_TD):
            calls.append(name)
            return x_TD * 1.0

        return Candidate(name, forward, "all rows")

    times = time_all([candidate(name) for name in "abc"], problem_of(), rounds=2, warmup=1)
    assert "".join(calls) == "abc" + "bca" + "cab"
    assert set(times) == set("abc")
    assert all(0 < each.minimum_ms <= each.median_ms for each in times.values())


class Doubled(nn.Module):
    """Keeps one tensor of its input's size for backward."""

    def forward(self, x):
        return x.square()


def hooked_candidate(rows):
    """A candidate with a router that keeps nothing, and experts over some of the rows."""
    router, experts = nn.Identity(), Doubled()

    def forward(x_TD):
        x_TD = router(x_TD * 1.0)
        return experts(x_TD[:rows].clone()).sin()

    return Candidate("hooked", forward, "all rows", router_module=router, expert_modules=[experts])


def test_bytes_kept_are_counted_inside_experts_and_outside():
    problem = problem_of()
    row_bytes = TINY.width * 4
    memory = memory_of(hooked_candidate(rows=5), problem)
    assert memory.kept - memory.kept_outside == 5 * row_bytes  # what is squared
    assert memory.kept_outside == 5 * row_bytes  # what sine is taken of
    assert memory.peak >= memory.kept


def test_our_layer_keeps_probabilities_and_tokens_outside_experts_and_integers():
    sizes = replace(TINY, experts=32, total_tokens=1024)
    result = run_case(sizes, ONCE, only=["ours, packed", "ours, padded"])
    for row in result.rows:
        if row.name.startswith("ours"):
            floats = 4 * sizes.tokens * (sizes.experts + sizes.width)
            assert floats <= row.kept_outside_bytes <= floats + 64 * sizes.tokens


def test_gradients_are_added_once_by_the_layer_or_for_it():
    problem = problem_of()
    plain = build_plain(problem)
    buffers = GradientBuffers(problem)
    buffers.attach(plain)
    run = Pass(plain, problem)
    for _ in range(2):
        run()
    (wi,) = plain.wi
    assert wi.grad is None
    added = wi.main_grad.clone()
    wi.grad_added_to_main_grad = True  # what a layer says that has added its gradient itself
    run()
    assert wi.grad is None
    assert torch.equal(wi.main_grad, added)
    alone = build_plain(problem)
    Pass(alone, problem)()
    torch.testing.assert_close(added, 2 * alone.wi[0].grad)


def test_separate_parameters_share_the_buffers_of_their_experts():
    problem = problem_of()
    buffers = GradientBuffers(problem)
    plain = build_plain(problem)
    apart = replace(plain, wi=[nn.Parameter(each) for each in problem.wi_eFD], wo=[])
    buffers.attach(plain)
    buffers.attach(apart)
    stacked = plain.wi[0].main_grad
    assert [each.main_grad.data_ptr() for each in apart.wi] == [e.data_ptr() for e in stacked]


def test_phases_are_those_of_the_table_and_floors_have_none():
    phases = phases_ms(hooked_candidate(rows=3), problem_of(), rounds=1)
    assert tuple(phases) == PHASES
    assert phases["exchange"] == 0.0
    assert all(phases[name] > 0.0 for name in ("route", "permute", "experts", "combine"))
    floor = Candidate("floor", lambda x_TD: x_TD, "all rows")
    assert phases_ms(floor, problem_of(), rounds=1) == {}


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name)
    )
    result = run_case(TINY, ONCE, only=["Hugging Face", "plain torch"])
    (row,) = [row for row in result.rows if row.name == "Hugging Face"]
    assert row.differs == "transformers is not installed: pip install -e '.[bench]'"
    assert row.minimum_ms is None
    assert row.differs in list(result.tables()[0].columns[-1].cells)


def test_sizes_that_do_not_fit_are_refused_with_their_size():
    large = Sizes(experts=2048, total_tokens=4096)
    parts = large.memory_parts()
    assert parts["gradients"] >= 2 * parts["weights"] - 2**23 > 2**34
    with pytest.raises(BenchError, match=r"would take about 4\d\.\d\d GiB .* 1\.00 GiB are free"):
        large.check_memory(free_bytes=2**30)
    TINY.check_memory(free_bytes=2**30)
    alone = replace(large, without_experts=True).memory_parts()
    assert alone["weights"] == 4 * 2048 * large.width


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--experts", "7", "--world", "2"], "7 experts cannot be shared evenly by 2 ranks"),
        (["--tokens", "5", "--world", "2"], "Set --tokens to a multiple of --world 2"),
        (["--ffn", "0"], "Sizes are at least 1, got --ffn 0."),
        (["--tokens", "0"], "Sizes are at least 1, got --tokens 0."),
        (["--capacity-factor", "0"], "A capacity factor is positive, got --capacity-factor 0.0."),
        (["--rounds", "0"], "Timing takes at least 1 pass, got --rounds 0."),
        (["--experts", "100000000"], "Lower --experts, --ffn or --tokens"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_starts(argv, message, capsys):
    assert bench_layer.main(argv) == 2
    assert message in capsys.readouterr().err


def test_the_program_prints_tables_and_writes_json(tmp_path, capsys):
    path = tmp_path / "bench.json"
    sizes = "--experts 2 4 --tokens 16 --width 4 --ffn 8 --threads 1 --rounds 1 --warmup 0"
    only = ["--only", "ours, packed", "plain torch", "--clock", "cpu"]
    assert bench_layer.main([*sizes.split(), *only, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("### E ") == 2
    for column in (*TIME_COLUMNS, *INSIDE_COLUMNS):
        assert f"| {column} " in printed or f" {column} |" in printed
    numbers = json.loads(path.read_text(encoding="utf-8"))
    assert numbers["versions"]["torch"] == metadata.version("torch")
    assert [case["sizes"]["experts"] for case in numbers["cases"]] == [2, 4]
    for case in numbers["cases"]:
        ratios = {row["name"]: (row["to_floor"], row["to_ours"]) for row in case["rows"]}
        assert ratios["ours, packed"][1] == 1.0
        assert 1.0 in {to_floor for to_floor, _ in ratios.values()}


def test_ratios_are_between_minima():
    rows = [
        Row("ours, packed", "", median_ms=9.0, minimum_ms=4.0, kept_bytes=0),
        Row("ours, padded", "", median_ms=9.0, minimum_ms=8.0, kept_bytes=0),
        Row("floor: dense", "", median_ms=9.0, minimum_ms=2.0, kept_bytes=0),
        Row("DeepSpeed", "is not here"),
    ]
    result = CaseResult("title", {}, 4, 4, rows)
    json_rows = result.as_json()["rows"]
    assert [row["to_floor"] for row in json_rows] == [2.0, 4.0, 1.0, None]
    assert [row["to_ours"] for row in json_rows] == [1.0, 2.0, 0.5, None]


def test_a_result_is_read_as_it_was_written(tmp_path):
    row = Row("ours, packed", "", 1.0, 2.0, 3, 4, 5, 1e-6, {"route": 1.0})
    result = CaseResult("title", {"world": 1}, 4, 3, [row])
    result.write(tmp_path / "result.json")
    assert CaseResult.read(tmp_path / "result.json") == result


def test_the_published_tables_are_these():
    cpu = bench_layer.SUITES["cpu"]
    assert {(each.total_tokens, each.width, each.ffn, each.dtype) for each in cpu} == {
        (4096, 512, 2048, "float32")
    }
    whole = [each for each in cpu if not each.without_experts and each.world == 1]
    assert [each.experts for each in whole if not each.accumulate] == [8, 64, 128]
    assert [each.experts for each in whole if each.accumulate] == [8, 64, 128]
    assert [each.experts for each in cpu if each.without_experts] == [8, 128, 2048]
    assert [each.world for each in cpu if each.world > 1] == [2, 4]
    assert {each.device for each in bench_layer.SUITES["gpu"]} == {"cuda"}


@pytest.mark.parametrize("argv", [["--suite", "cpu"], ["--experts", "8", "64"]])
def test_threads_are_those_of_the_command_line_where_it_says_some(argv):
    def threads(*more):
        args = bench_layer.parser().parse_args([*argv, *more])
        return {each.threads for each in bench_layer.cases_of(args) if each.world == 1}

    assert threads() == {2}
    assert threads("--threads", "3") == {3}


def test_the_page_names_every_layer_and_its_commands_are_real():
    page = (Path(bench_layer.__file__).parents[1] / "docs" / "performance.md").read_text()
    commands = re.findall(r"^python tools/bench_layer\.py (.*)$", page, flags=re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert bench_layer.cases_of(bench_layer.parser().parse_args(shlex.split(command)))
    for name in NAMES:
        assert f"\n| {name} | " in page
