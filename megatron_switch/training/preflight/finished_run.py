"""Whether a run that is started again has already done all of its iterations.

Megatron would load such a run, train nothing, evaluate it once more, and end. Here a run that goes
on in its own folder (``--load`` is ``--save``) and is finished ends at once and with success, so
that a job which is started again and again needs to know nothing: nothing is evaluated and no file
is written. What was saved somewhere else is loaded as Megatron does, and said.
"""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.checkpoint.load.files import Asker, find_checkpoint, has_checkpoint


@dataclass(frozen=True)
class Finished:
    """A checkpoint at or behind the end of the run."""

    text: str
    """One line about it."""
    ends_here: bool
    """Whether there is nothing to do."""


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
    asker = Asker(is_own_folder=is_own)
    found = find_checkpoint(Path(args.load), iteration=args.ckpt_step, asker=asker)
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
            f"This run is finished: {where}, so nothing was done. To go on, raise {flag} together "
            "with --override-opt_param-scheduler; to evaluate it again, add --skip-train.",
            ends_here=True,
        )
    return Finished(
        f"{where}, so nothing is trained and it is only evaluated. To train from its weights, add "
        f"--finetune; to go on with that run, raise {flag} together with "
        "--override-opt_param-scheduler.",
        ends_here=False,
    )
