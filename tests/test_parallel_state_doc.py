"""What docs/parallel_state.md shows runs, on as many ranks as it says; what it names exists."""

import contextlib
import io
import re
from pathlib import Path

from megatron_switch import parallel_state
from megatron_switch.layout.grid import GROUP_NAMES
from megatron_switch.testing.ranks import run_ranks

PAGE = (Path(__file__).parents[1] / "docs" / "parallel_state.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
ARGUMENTS = re.findall(r"^\| `(\w+)` \| (?:\w+: |which axis)", PAGE, flags=re.MULTILINE)


def test_every_block_runs_and_prints_what_it_says_on_eight_ranks():
    assert len(BLOCKS) >= 9
    run_ranks(_run_blocks, 8)


def _run_blocks(rank):
    """Run all blocks one after another, as one program."""
    names = {}
    for number, block in enumerate(BLOCKS, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, f"block {number}", "exec"), names)
        shown = re.findall(r"^# (.*\n)", block, flags=re.MULTILINE)
        assert printed.getvalue() == "".join(shown)


def test_every_group_is_in_the_table():
    rows = re.findall(r"^\| (`[a-z_`, ]+) \|", PAGE.partition("## Experts")[0], flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert set(named) - set(ARGUMENTS) == set(GROUP_NAMES)


def test_every_public_function_is_on_the_page():
    axes = re.findall(r"`(\w+_parallel)`", PAGE)
    getters = {f"get_{axis}_{what}" for axis in axes for what in ("group", "rank", "world_size")}
    functions = {
        name
        for name, value in vars(parallel_state).items()
        if callable(value) and name[:4] in ("get_", "init", "devi", "dest", "is_i")
    }
    for_training = {"initialize_model_parallel_as_pretrain"}
    undocumented = functions - for_training - getters - set(re.findall(r"\w+", PAGE))
    assert undocumented == set()
    assert getters <= functions


def test_every_argument_is_in_the_table():
    code = parallel_state.initialize_model_parallel.__code__
    assert list(code.co_varnames[: code.co_argcount]) == ARGUMENTS
