"""docs/runs.md names flags that exist, exit codes that are returned, and keys that are written."""

import json
import re
from pathlib import Path

from support.run_arguments import arguments

from megatron_switch.flags.train_flags import flag_names
from megatron_switch.layout.grid import Layout
from megatron_switch.training.arguments.parser import parse_command_line
from megatron_switch.training.logs.run_record import RunRecord
from megatron_switch.utils.exit_codes import INTERRUPTED, SAVED, USER_ERROR

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "runs.md").read_text(encoding="utf-8")


def test_its_flags_exist():
    assert set(re.findall(r"--([a-z][\w-]+)", PAGE)) <= set(flag_names())


def test_what_it_shows_keeps_what_it_says():
    (shown,) = re.findall(r"```bash\n(.*)\n```", PAGE)
    args = parse_command_line(shown.split()).args
    assert (args.switch_keep_checkpoints, args.save_retain_interval) == (3, 10_000)


def test_its_exit_codes_are_those_of_the_program():
    codes = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)
    assert list(map(int, codes)) == [0, SAVED, USER_ERROR, INTERRUPTED, 1]


def test_a_start_has_what_it_lists(tmp_path):
    record = RunRecord(tmp_path / "run.json")
    record.begin(arguments(), "train", "cpu", layout=Layout(1), hosts=["node1"])
    record.end(code=0, reason="finished", iteration=4)
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    listed = re.search(r"each start: ([^;]*?), and its `exit` \(([\w, ]*);", PAGE)
    assert {name.split()[0].lower() for name in listed[1].split(", ")} <= start.keys()
    assert set(listed[2].split(", ")) <= start["exit"].keys()
