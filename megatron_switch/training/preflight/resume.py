"""What ``--load`` names, before Megatron reads it: there, whole, of this model, and not finished.

Megatron answers an empty tracker file with exit code 0, a missing one with random weights, and
another model with a shape error deep inside. All of that is decided here, from the files alone.

One case is not an error: a job that always passes the same folder to ``--load`` and ``--save``
finds nothing there when it runs for the first time, and starts from new weights.

Of a run that has done all its iterations Megatron would load the checkpoint, train nothing,
evaluate it once more, and end. Here a run that continues in its own folder (``--load`` is
``--save``) and is finished ends at once and with success, so that a job may be started again and
again: nothing is evaluated and no file is written. What was saved somewhere else is loaded as
Megatron does, with a note.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron.training import get_tokenizer

from megatron_switch.architecture.vocabulary import padded_vocab_size
from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.checkpoint.load.files import (
    INCOMPLETE,
    LoadContext,
    find_checkpoint,
    has_checkpoint,
    interrupted_first_save,
    is_same_folder,
    set_aside,
    write_tracker,
)
from megatron_switch.checkpoint.load.settings_agreement import check_resume
from megatron_switch.errors import ConfigError
from megatron_switch.training.arguments.stored_arguments import compared_attributes
from megatron_switch.training.logs.run_folder import RECORD

_RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True)
class Finished:
    """A checkpoint at or behind the end of the run."""

    text: str
    """One line about it."""
    ends_here: bool
    """Whether there is nothing to do."""


def keep_own_progress(args: Namespace, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Let nothing that the folder of ``--save`` holds be trained again or saved over unseen.

    A restart continues from what its job saved last, wherever the first start began.

    Args:
        args: Arguments with the run folder's places filled in; changed in place.
        environ: Environment variables of the process.

    Returns:
        What the user should know.

    Raises:
        ConfigError: The run would save over checkpoints that it does not continue, or every restart
            would begin again.
    """
    if args.save is None or args.skip_train or args.ckpt_convert_format is not None:
        return ()
    saved = Path(args.save)
    if args.switch_run_dir is None and (saved / RECORD).exists():
        raise ConfigError(
            f"--save {saved} is the folder of a run. To continue that run, give it to "
            "--switch-run-dir instead; else give another folder."
        )
    if is_same_folder(args.load, args.save):
        args.load = args.save
    if not has_checkpoint(saved) or interrupted_first_save(saved):
        return ()
    is_restart = any(environ.get(name, "").strip("0").isdecimal() for name in _RESTART_COUNTS)
    if args.load != args.save:
        return (_continue_own(args) if is_restart else _refuse_to_save_over(args),)
    if args.finetune:
        raise ConfigError(
            f"--finetune begins again at iteration 0, and with --load and --save in one folder, "
            f"{args.save}, so would every restart, over the checkpoints of the one before. Give "
            "another folder to --save or --switch-run-dir, and this one to --load."
        )
    if args.ckpt_step is None or not is_restart:
        return ()
    step, args.ckpt_step = args.ckpt_step, None
    return (f"--ckpt-step {step} was where this job began; its restart continues from there on.",)


def _continue_own(args: Namespace) -> str:
    began = f"--load {args.load}" if args.load else "new weights"
    args.load, args.finetune, args.ckpt_step = args.save, False, None
    return f"This restart continues from {args.save}; its job began from {began}."


def _refuse_to_save_over(args: Namespace) -> NoReturn:
    begins = f"from --load {args.load}" if args.load else "from new weights"
    raise ConfigError(
        f"--save {args.save} holds checkpoints already, and this run begins {begins}: it would "
        f"save over them. To continue them, give --load {args.save}; else give another folder to "
        "--save."
    )


def find_finished(args: Namespace) -> Finished | None:
    """Return what ``--load`` names if it has nothing left to train, else None.

    Args:
        args: Validated arguments.

    Raises:
        CheckpointError: Nothing complete is there.
    """
    counts_anew = args.finetune or args.skip_train or args.ckpt_convert_format is not None
    if args.load is None or counts_anew or not has_checkpoint(Path(args.load)):
        return None
    is_own = args.load == args.save
    if is_own and interrupted_first_save(Path(args.save)):
        return None
    context = LoadContext(is_own_folder=is_own)
    found = find_checkpoint(Path(args.load), iteration=args.ckpt_step, context=context)
    state = read_common_state(found.folder)
    if found.is_release:  # weights to begin with
        return None
    iteration = int(state.get("iteration", found.iteration))
    flag, done, wanted = "--train-iters", iteration, args.train_iters
    if args.train_samples:
        stored = state.get("args")
        flag, wanted = "--train-samples", args.train_samples
        done = int(getattr(stored, "consumed_train_samples", 0))
    if not wanted or done < wanted:
        return None
    unit = "iteration" if flag == "--train-iters" else "sample"
    where = f"{args.load} is at {unit} {done} of {wanted} ({flag})"
    if is_own:
        return Finished(
            f"This run is finished: {where}, so nothing was done. To continue, raise {flag} "
            "together with --override-opt_param-scheduler; to evaluate it again, add --skip-train.",
            ends_here=True,
        )
    return Finished(
        f"{where}, so nothing is trained and it is only evaluated. To train from its weights, add "
        f"--finetune; to continue that run, raise {flag} together with "
        "--override-opt_param-scheduler.",
        ends_here=False,
    )


def find_what_to_load(args: Namespace) -> tuple[str, ...]:
    """Check what ``--load`` names, and make Megatron load exactly that checkpoint.

    Args:
        args: Validated arguments; ``padded_vocab_size`` may be set.

    Returns:
        What the user should know.

    Raises:
        CheckpointError: Nothing complete is there, or it does not fit this run.
    """
    interrupted = _interrupted_first_save(args)
    first = []
    if interrupted:
        first = [
            f"The first save into {args.save} was interrupted: what there is of "
            f"{', '.join(interrupted)} is renamed to *.{INCOMPLETE}, and training begins again."
        ]
    if args.load is not None and args.load == args.save:
        if interrupted:
            args.load = None
        elif not has_checkpoint(Path(args.load)):
            args.load = None
            first = [f"{args.save} holds no checkpoint yet: training starts from new weights."]
    if args.load is None:
        return tuple(first)
    context = LoadContext(is_own_folder=args.load == args.save)
    found = find_checkpoint(Path(args.load), iteration=args.ckpt_step, context=context)
    state = read_common_state(found.folder)
    args.padded_vocab_size = padded_vocab_size(
        get_tokenizer().vocab_size,
        make_divisible_by=args.make_vocab_size_divisible_by,
        tensor_parallel_size=args.tensor_model_parallel_size,
        stored=getattr(state.get("args"), "padded_vocab_size", None),
    )
    notes = check_resume(state, args, model=compared_attributes(), is_release=found.is_release)
    if found.message is not None and args.rank == 0 and not args.fake_process_group:
        # Megatron reads the tracker first, and ends with exit code 0 where it is empty.
        write_tracker(Path(args.load), found)
    return (*first, *([found.message] if found.message else []), *notes)


def clear_the_way(args: Namespace) -> None:
    """Prepare, on one rank, the folder of checkpoints for the first save of this start.

    Incomplete iterations of a first save that was interrupted are renamed. The tracker of the run's
    own folder names the iteration that ``--ckpt-step`` loaded, so that a restart, which no longer
    gives the flag, continues from there or from what was saved since.

    Args:
        args: Arguments of a run that has loaded its checkpoint.
    """
    interrupted = _interrupted_first_save(args)
    if interrupted:
        set_aside(Path(args.save), interrupted)
    if args.ckpt_step is not None and args.load == args.save and not args.skip_train:
        write_tracker(Path(args.load), find_checkpoint(Path(args.load), iteration=args.ckpt_step))


def _interrupted_first_save(args: Namespace) -> list[str]:
    """Return the incomplete iterations in the folder that this run saves into."""
    return [] if args.save is None or args.skip_train else interrupted_first_save(Path(args.save))
