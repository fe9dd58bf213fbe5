"""What is no known noise reaches the screen, all of it the log, and nothing is left behind."""

import logging
import sys
import warnings
from contextlib import contextmanager, nullcontext

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.training.logs import console as console_module
from megatron_switch.training.logs.console import Console
from megatron_switch.training.logs.known_warnings import KNOWN_WARNINGS, find_known_warning

SHOWN = """\
 [2026-01-01 10:00:00.000001] iteration        1/       3 | consumed samples:            8 |
 validation loss at iteration 2 | lm loss value: 6.8E+00 |
 validation-code loss at iteration 2 after training | lm loss value: 6.8E+00 |
 validation routing at iteration 2 | dropped: 0.0234 |
 test routing at iteration 3 | dropped: 0.0391 |
[2026-01-01 10:00:00.000001] saving checkpoint at iteration       3 to run in torch_dist format
  [2026-01-01 10:00:00.000001] successfully saved checkpoint from iteration       3 to run
 loading distributed checkpoint from run at iteration 3
  successfully loaded checkpoint from run [ t 1/1, p 1/1 ] at iteration 3
 loading release distributed checkpoint from run
(TP, PP) mismatch after resume ((1, 2) vs (2, 1) from checkpoint): RNG state will be ignored
WARNING: Starting a checkpoint save before previous has finished.
> WARNING: 2 layers have no counterpart
a line that no version of Megatron has printed yet"""
HIDDEN = """\
[exiting program after receiving SIGTERM.] datetime: 2026-01-01 10:00:00
using world size: 1, data-parallel size: 1
Number of virtual stages per pipeline stage: None
accumulate and all-reduce gradients in fp32 for bfloat16 data type.
using torch.float32 for parameters ...
torch distributed is already initialized, skipping initialization ...
model parallel is already initialized
> setting random seeds to 1234 ...
> compiling dataset index builder ...
>>> done with dataset index builder. Compilation time: 0.001 seconds
time to initialize megatron (seconds): 1.2
[after megatron is initialized] datetime: 2026-01-01 10:00:00\x20
 > number of parameters on (tensor, gtp_remat, pipeline) model parallel rank (0, 0, 0): 83296
 > datasets target sizes (minimum size):
    train:      24
    validation: None
done with setup ...
training ...
Overwriting rerun_state_machine.current_iteration from -1 to 0...
Job sharding has changed: Rerun state will be ignored
 checkpoint version 3.0
sharded_state_dict metadata loaded from the checkpoint: {'singleton_local_shards': False}
Number of parameters in most loaded shard in billions: 0.0001
Total number of active parameters in billions: 0.00
Theoretical memory footprints: weight and optimizer=1.43 MB, activation=0.12 MB, total=1.55 MB
Activation memory footprint per transformer layer (precise, without SP): 0.1 MB
compute_activation_memory_without_sp
Memory penalty from interleaved schedule: 1.50
Number of in-flight microbatches: 2
[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: 1.2
Evaluating on 8 samples
Evaluating iter 1/1
(min, max) time across ranks (ms):
    evaluate .......................................: (105.46, 105.46)
Storing distributed optimizer sharded state of type fully_reshardable
---------------------------------------------------------------------

WARNING: one_logger package is required to enable e2e metrics tracking."""
ARGUMENTS = """\
------------------------ arguments ------------------------
  iteration ....................................... 3
  inference_dynamic_batching_track_generated_token_events  False
  text ............................................ two
lines
-------------------- end of arguments ---------------------"""


@pytest.fixture
def temporary_logs(monkeypatch, tmp_path):
    monkeypatch.setattr(console_module.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def use(console, error):
    """Print inside a console, and fail if there is an error."""
    with console:
        print("last words")
        if error is not None:
            raise error


@contextmanager
def committed(folder, rank):
    """A console of a run that has begun."""
    with Console(folder, rank=rank) as console:
        console.commit_log()
        yield console


@pytest.mark.parametrize("line", SHOWN.splitlines())
def test_a_line_is_shown_and_logged_unless_it_is_known(tmp_path, capsys, line):
    with committed(tmp_path, rank=2) as console:
        print(line)
    assert capsys.readouterr().out == line + "\n"
    assert console.log_path.read_text() == line + "\n"


def test_the_test_loss_is_not_called_validation(tmp_path, capsys):
    with committed(tmp_path, rank=0) as console:
        print(" validation loss at iteration 3 on test set | lm loss value: 6.8E+00 |")
    assert capsys.readouterr().out == " test loss at iteration 3 | lm loss value: 6.8E+00 |\n"
    assert console.log_path.read_text().startswith(" test loss at iteration 3 |")


@pytest.mark.parametrize("line", HIDDEN.splitlines())
def test_what_megatron_prints_in_every_run_is_only_logged(tmp_path, capsys, line):
    with committed(tmp_path, rank=0) as console:
        print(line)
    assert capsys.readouterr().out == ""
    assert console.log_path.read_text().startswith(line + "\n")


def test_the_list_of_arguments_is_only_logged_and_what_follows_is_shown(tmp_path, capsys):
    with committed(tmp_path, rank=0) as console:
        print(f"{ARGUMENTS}\nnews")
    assert capsys.readouterr().out == "news\n"
    assert console.log_path.read_text() == f"{ARGUMENTS}\nnews\n"


def test_lines_are_put_together_from_pieces_and_the_last_one_is_kept(tmp_path, capsys):
    with committed(tmp_path, rank=0) as console:
        print(" validation ", end="")
        print("loss at iteration 1\ntrai", end="", flush=True)
        sys.stdout.write("ning ...")
    assert capsys.readouterr().out == " validation loss at iteration 1\n"
    assert console.log_path.read_text() == " validation loss at iteration 1\ntraining ...\n"


@pytest.mark.parametrize(("rank", "screen"), [(0, "hello\nyou\n"), (1, "")])
def test_one_rank_speaks_and_all_log_it(tmp_path, capsys, rank, screen):
    with committed(tmp_path, rank=rank) as console:
        console.say("hello\nyou")
    assert capsys.readouterr().out == screen
    assert (tmp_path / f"rank-{rank}.log").read_text() == "hello\nyou\n"


@pytest.mark.parametrize(("rank", "screen"), [(0, ""), (3, "high\n")])
def test_what_is_about_losses_is_shown_by_the_rank_that_prints_them(tmp_path, capsys, rank, screen):
    with Console(tmp_path, rank=rank, world_size=4) as console:
        console.commit_log()
        console.say_beside_losses("high")
    assert capsys.readouterr().out == screen
    assert (tmp_path / f"rank-{rank}.log").read_text() == "high\n"


def test_warnings_and_log_records_go_to_the_log(tmp_path, capsys):
    with committed(tmp_path, rank=0) as console, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("something is odd", stacklevel=1)
        logging.getLogger("library").warning("also odd")
    assert capsys.readouterr() == ("", "")
    log = console.log_path.read_text()
    assert "UserWarning: something is odd" in log
    assert "also odd" in log
    assert "known" not in log


def test_a_log_is_continued_by_the_next_start(tmp_path):
    for text in ("first", "second"):
        with committed(tmp_path / "log", rank=0) as console:
            print(text)
    assert console.log_path.read_text() == "first\nsecond\n"


def test_a_run_that_never_begins_leaves_its_folder_alone(temporary_logs):
    folder = temporary_logs / "log"
    with pytest.raises(ConfigError):
        use(Console(folder, rank=0), ConfigError("a flag"))
    assert list(temporary_logs.iterdir()) == []


def test_the_log_has_what_was_printed_before_the_run_began(temporary_logs):
    folder = temporary_logs / "log"
    with Console(folder, rank=1) as console:
        print("checks")
        console.commit_log()
        console.commit_log()  # again is no harm
        print("training")
    assert list(temporary_logs.rglob("*.log")) == [folder / "rank-1.log"]
    assert console.log_path.read_text() == "checks\ntraining\n"


def test_everything_is_given_back(tmp_path):
    before = (sys.stdout, warnings.showwarning, list(logging.getLogger().handlers))
    with pytest.raises(RuntimeError, match="broken"):
        use(committed(tmp_path, rank=0), RuntimeError("broken"))
    assert (sys.stdout, warnings.showwarning, list(logging.getLogger().handlers)) == before


@pytest.mark.parametrize("error", [None, SystemExit(), SystemExit(0), ConfigError("a flag")])
def test_a_temporary_log_goes_with_a_run_that_ends_well(temporary_logs, error):
    console = Console(None, rank=3)
    assert f"{console.log_path}, kept only if the run fails" in console.log_text
    assert list(temporary_logs.iterdir()) == [console.log_path]
    with nullcontext() if error is None else pytest.raises(type(error)):
        use(console, error)
    assert list(temporary_logs.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(1)])
def test_a_temporary_log_of_a_failure_stays_and_is_named_below_the_traceback(temporary_logs, error):
    with pytest.raises(type(error)) as raised:
        use(Console(None, rank=3), error)
    (log,) = temporary_logs.iterdir()
    assert log.read_text() == "last words\n"
    assert raised.value.__notes__ == [f"What rank 3 printed before: {log}"]


def test_the_start_up_text_names_the_folder_of_all_logs(temporary_logs):
    folder = temporary_logs / "log"
    assert Console(folder, rank=0).log_text.startswith(f"{folder}: all output")


# One line of each, as Megatron-Core 0.19.2 and torch 2.14 write them.
WARNINGS = [
    "GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes, no new features.",
    "WARNING: one_logger package is required to enable e2e metrics tracking.",
    "MCore's async save is deprecated and will be removed in the future releases.",
    "base_configs.py:12: UserWarning: MimoModelConfig is experimental and still under active",
    "UserWarning: moe_ffn_hidden_size is not set, using ffn_hidden_size for MoE instead.",
    "UserWarning: Could not determine rank from torch.distributed, RANK, or SLURM_PROCID.",
    "FutureWarning: `torch.distributed.all_gather_into_tensor` is deprecated. Please use",
    "UserWarning: CPU RNG state changed within GPU RNG context",
    "UserWarning: The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.",
    "Unable to save MockGPTDataset indexes because path_to_cache is None",
    "UserWarning: Please specify --split when using --data-path. Using legacy default value",
    "WARNING: Setting args.overlap_p2p_comm and args.align_param_gather to False since",
    "UserWarning: torch.distributed is disabled, unavailable or uninitialized, assuming the intent",
    "FutureWarning: Please use DTensor instead and we are deprecating ShardedTensor.",
    "UserWarning: Initializing zero-element tensors is a no-op",
]


def test_the_table_knows_each_warning_once():
    found = [find_known_warning(line) for line in WARNINGS]
    assert found == list(KNOWN_WARNINGS)
    assert find_known_warning("iteration 3/10") is None


@pytest.mark.parametrize("known", KNOWN_WARNINGS, ids=lambda known: known.pattern)
def test_a_meaning_is_whole_sentences(known):
    assert known.meaning[0].isupper()
    assert known.meaning.endswith(".")


def test_a_known_warning_is_explained_below_its_first_occurrence(tmp_path, capsys):
    with committed(tmp_path, rank=0) as console:
        for _ in range(3):
            logging.getLogger("megatron").warning(WARNINGS[0])
        print(WARNINGS[1])
    lines = console.log_path.read_text().splitlines()
    assert [line[:9] for line in lines] == ["GPTModel ", "    (know", "GPTModel ", "GPTModel ",
                                            "WARNING: ", "    (know"]  # fmt: skip
    assert lines[1] == f"    (known, no action needed: {KNOWN_WARNINGS[0].meaning})"
    assert capsys.readouterr().out == ""
