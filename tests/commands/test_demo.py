"""The demo's texts, from records small enough to read, and how it follows a training."""

import io
import json
import os
import shutil
import subprocess
import sys
import textwrap
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from megatron_switch.commands import demo, table
from megatron_switch.commands.demo import health_bars, read_metrics, summary
from megatron_switch.errors import ConfigError, SwitchError

FIRST = {
    "kind": "train",
    "iteration": 1,
    "lm_loss": 7.5,
    "dropped_fraction": 0.1,
    "load_balancing_loss": 1.2,
    "expert_load_max_over_mean": 2.0,
}
LAST = {
    **FIRST,
    "iteration": 200,
    "lm_loss": 4.25,
    "layers": [2, 4],
    "expert_load": [[0.5, 0.5], [0.75, 0.25]],
}


def test_summary_compares_the_first_with_the_last_training_record():
    records = [FIRST, LAST, {"kind": "validation", "iteration": 200, "lm_loss": 1.0}]
    text = summary(records, seconds=140.2, peak_bytes=3 * 2**30)
    assert "7.500 at iteration 1, 4.250 at iteration 200 (3.25 nats lower)" in text
    assert "140 s, 3.00 GiB" in text


def test_a_bar_is_as_long_as_its_load():
    lines = health_bars([FIRST, LAST]).splitlines()
    bars = [line.count("█") for line in lines[1:-1]]
    assert bars == [14, 14, 21, 7]
    assert lines[3].startswith("  layer 4 expert  0  75.0%")
    assert "50.0%, 14 marks" in lines[-1]


def test_bars_of_a_collapsed_layer_fit_on_a_line_and_stay_in_proportion():
    loads = [[0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.125] * 8]
    *lines, last = health_bars([{**LAST, "expert_load": loads}]).splitlines()
    assert [line.count("█") for line in lines[1:]] == [0, 48, *[0] * 6, *[6] * 8]
    assert max(map(len, lines)) < 80
    assert last == "A fair share is 12.5%, 6 marks long."


@pytest.mark.slow
@pytest.mark.timeout(300)  # five interpreters import all of Megatron, or become it
def test_the_demo_itself_on_a_corpus_of_its_size_in_small(tmp_path):
    """As it is, but for the corpus: the library's shortest modules instead of all."""
    text = tmp_path / "text"
    text.mkdir()
    modules = sorted(Path(os.__file__).parent.glob("*.py"), key=lambda path: path.stat().st_size)
    for path in modules[:120]:
        shutil.copy(path, text)
    program = f"""
        import sys
        from megatron_switch.cli import main
        from megatron_switch.data.preparation import prepare
        from pathlib import Path
        prepare.library_root = lambda: Path({str(text)!r})
        sys.exit(main(sys.argv[1:]))
    """
    words = ["demo", "--iterations", "10", "--vocab-size", "400", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [each["lm_loss"] for each in records if each["kind"] == "train"]
    first, last = losses[0], losses[9]
    assert last < first
    told = f"{first:.3f} at iteration 1, {last:.3f} at iteration 10 ({first - last:.2f} nats lower)"
    assert told in done.stdout
    for layer in (2, 4):
        assert done.stdout.count(f"  layer {layer} expert ") == 8
    assert "Experts of layer 4, the last sparse one." in done.stdout
    assert "\ndef read(self, " in done.stdout
    # Whole lines that can be copied, however narrow the screen.
    assert f"generate --load {tmp_path / 'run'} --prompt 'import '\n" in done.stdout


def test_a_line_under_way_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(FIRST) + "\n" + json.dumps(LAST)[:20])
    assert read_metrics(path) == [FIRST]
    assert read_metrics(tmp_path / "none") == []


def trains_like(monkeypatch, program):
    """Let a short program stand in for the training."""
    monkeypatch.setattr(demo, "_command", lambda *words: [sys.executable, "-c", program])


def follow(tmp_path, iterations):
    screen = Console(file=io.StringIO(), width=300)
    demo._train([], tmp_path / "run", iterations, screen)
    return screen.file.getvalue()


def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(monkeypatch, tmp_path):
    def seen(process, metrics, memory):
        process.wait()
        for done in (1, 19, 20, 39, 47, 47, 50):
            yield {**FIRST, "iteration": done}

    monkeypatch.setattr(demo, "_follow", seen)
    trains_like(monkeypatch, "pass")
    text = follow(tmp_path, 50)
    assert f"about 2 minutes on 2 cores; follow with:\n  tail -f {tmp_path / 'train.log'}\n" in text
    told = [line.split()[1] for line in text.splitlines() if line.startswith("iteration ")]
    assert told == ["1/50", "20/50", "47/50"]


def test_a_training_that_fails_is_an_error_with_its_output(monkeypatch, tmp_path, capsys):
    trains_like(monkeypatch, "print('no such layout'); raise SystemExit(2)")
    with pytest.raises(SwitchError, match=r"exit code 2; .*train\.log.*--output"):
        follow(tmp_path, 50)
    assert "no such layout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "stop"), [([FIRST, {**FIRST, "iteration": 67}], 67), ([], 0)], ids=["some", "none"]
)
def test_training_that_was_stopped_is_said_and_not_looked_at(
    monkeypatch, tmp_path, capsys, records, stop
):
    def train(flags, folder, iterations, screen):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        return 1.0, 1

    monkeypatch.setattr(demo.table, "run", lambda name, argv: 0)
    monkeypatch.setattr(demo, "_data_flags", lambda data: [])
    monkeypatch.setattr(demo, "_train", train)
    assert demo.run(Namespace(output=tmp_path, iterations=200, vocab_size=300, prompt="a")) == 1
    printed = capsys.readouterr()
    assert f"stopped at iteration {stop} of 200. The same command goes on" in printed.err
    assert str(tmp_path / "run" / "resume.sh") in printed.err
    assert "3. What happened" not in printed.out


def test_training_that_reached_its_end_was_not_stopped(tmp_path):
    validation = {"kind": "validation", "iteration": 300}
    assert demo.stopped_early([FIRST, LAST], 200, tmp_path) == ""
    assert "stopped at iteration 200" in demo.stopped_early([LAST, validation], 201, tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--iterations", "0"], r"--iterations must be at least 1, got 0"),
        (["--output", __file__], r"--output .*test_demo\.py cannot be made: .*Give a folder"),
    ],
)
def test_what_would_fail_after_the_preparation_fails_before_it(flags, message):
    with pytest.raises(ConfigError, match=message):
        table.run("demo", flags)
