"""Names of evaluations: of validation during training, of validation after it, and of the test.

Megatron calls every evaluation "validation", in its log writers and on the screen: the test loss
too, and a second validation after the last step, which reads other batches than the one during
training at the same iteration. Each has a name of its own here, so that no curve mixes them.
"""

import re
from argparse import Namespace
from typing import Any

VALIDATION, AFTER_TRAINING, TEST = "validation", "validation after training", "test"

_TAG = re.compile(r"(?P<value>.+) validation(?P<set>-\S+)?(?P<rest>( ppl)?( vs samples)?)$")
_LINE = re.compile(
    r"(?P<start> validation(?P<set>\S*)) loss at iteration (?P<iteration>\d+)"
    r" on (?P<split>validation|test) set \|"
)


def name_of_set(evaluation: str, validation_set: str) -> str:
    """Return the name of the evaluation of one of several validation sets.

    Args:
        evaluation: One of this module's three names.
        validation_set: What Megatron appends for the set, ``-code``; empty for the only one.
    """
    first, space, rest = evaluation.partition(" ")
    return f"{first}{validation_set}{space}{rest}"


def named_tag(tag: str, evaluation: str) -> str:
    """Return a tag of Megatron's log writers with the name of the evaluation that it belongs to.

    Args:
        tag: Such as ``lm loss validation vs samples``; others are returned as they are.
        evaluation: One of this module's three names.
    """
    match = _TAG.match(tag)
    if match is None:
        return tag
    return f"{match['value']} {name_of_set(evaluation, match['set'] or '')}{match['rest']}"


def named_line(line: str, *, trains: bool = True) -> str:
    """Return a line of the screen; Megatron's results after training get their evaluation's name.

    Args:
        line: Any line of the output.
        trains: Whether the run trains; with ``--skip-train`` there is one validation only.
    """
    match = _LINE.match(line)
    if match is None:
        return line
    start = " test" if match["split"] == "test" else match["start"]
    end = "" if match["split"] == "test" or not trains else " after training"
    return f"{start} loss at iteration {match['iteration']}{end} |{line[match.end() :]}"


def is_after_training(args: Namespace, iteration: int, *, seen: int) -> bool:
    """Return whether a validation is that after the last training step.

    Args:
        args: Validated arguments.
        iteration: The training steps that are finished.
        seen: Validation sets evaluated at this iteration before.
    """
    if args.skip_train or iteration < (args.train_iters or 0):
        return False
    starts = args.start_eval_at_iter is None or iteration >= args.start_eval_at_iter
    in_loop = bool(args.eval_interval) and iteration % args.eval_interval == 0 and starts
    sets = len(args.eval_iters) if isinstance(args.eval_iters, list) else 1
    return seen >= (sets if in_loop else 0)


class NamedValues:
    """Takes the place of Megatron's Weights & Biases writer: names evaluations, forwards the rest.

    Args:
        writer: The real one, the module ``wandb``.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.evaluation = VALIDATION

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log values under the name of the evaluation in progress."""
        named = {named_tag(name, self.evaluation): value for name, value in values.items()}
        self._writer.log(named, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return anything else of the real writer."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._writer, name)
