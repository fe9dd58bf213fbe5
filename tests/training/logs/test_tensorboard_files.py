"""A step that is computed again is in TensorBoard once, and what came before it is not touched."""

import pytest
from support.event_files import scalar_steps, scalar_tags
from torch.utils.tensorboard import SummaryWriter

from megatron_switch.training.logs.tensorboard_files import drop_from

BATCH = 8


def write(folder, steps, evaluated=()):
    """Write a file as Megatron does; sample counts pass iterations quickly."""
    with SummaryWriter(folder) as writer:
        writer.add_text("seed", "1234", global_step=steps[0] - 1)
        for step in steps:
            writer.add_scalar("lm loss", 5.0, step)
            writer.add_scalar("lm loss vs samples", 5.0, step * BATCH)
            if step in evaluated:
                writer.add_scalar("lm loss validation", 4.0, step)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, range(1, 5), evaluated=[2, 4])
    write(tmp_path, range(5, 9), evaluated=[6])
    return tmp_path


def contents(folder):
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def test_steps_from_the_next_one_on_are_dropped_and_sample_counts_stay(folder):
    drop_from(folder, 7)
    assert scalar_steps(folder, "lm loss") == [1, 2, 3, 4, 5, 6]
    assert scalar_steps(folder, "lm loss vs samples") == [BATCH * step for step in range(1, 7)]
    assert scalar_steps(folder, "lm loss validation") == [2, 4, 6]


def test_several_files_are_shortened(folder):
    drop_from(folder, 3)
    write(folder, [3])
    assert scalar_steps(folder, "lm loss") == [1, 2, 3]
    assert scalar_steps(folder, "lm loss validation") == [2]
    assert scalar_tags(folder) == ["lm loss", "lm loss validation", "lm loss vs samples"]


def test_nothing_is_dropped_where_no_step_is_repeated(folder):
    before = contents(folder)
    drop_from(folder, 9)
    assert contents(folder) == before


def test_a_record_that_a_killed_run_has_not_finished_is_no_obstacle(tmp_path):
    write(tmp_path, range(1, 5), evaluated=[4])
    (path,) = tmp_path.iterdir()
    torn = path.read_bytes()[:-7]  # in the last value, the validation of iteration 4
    path.write_bytes(torn)
    drop_from(tmp_path, 5)
    assert path.read_bytes() == torn
    drop_from(tmp_path, 4)
    assert scalar_steps(tmp_path, "lm loss") == [1, 2, 3]


def test_a_folder_that_does_not_exist_has_nothing_to_drop(tmp_path):
    drop_from(tmp_path / "new", 1)
    assert list(tmp_path.iterdir()) == []
