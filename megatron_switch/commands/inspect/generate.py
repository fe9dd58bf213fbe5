"""Text from a trained checkpoint: the continuation of a prompt.

Standard output carries text and nothing else: each prompt as it was given, followed at once by its
continuation as it grows. What there is to know besides goes to standard error.

An encoder-decoder does not continue a prompt, it answers: the prompt is its input, and the output
is the answer alone (:mod:`megatron_switch.commands.inspect.t5_generation`).

No token is dropped unless ``--drop`` asks for the capacity of evaluation. Capacity is counted from
the positions of a window, so ``--drop`` feeds windows as long as a training sequence, and what a
token meets is what it would meet in an evaluation with one sequence a micro-batch. Otherwise a
window is only as wide as the text can grow; its width changes nothing but the time it takes.

A seed gives the same text on every device and in every layout, up to rounding: tokens are drawn on
the CPU, and where several ranks share the model all of them follow the scores of rank 0, so that
no rank takes another path and leaves the others waiting.

Shape letters: B sequences (always 1), S positions of the window, V rows of the vocabulary.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.parameters import total_parameters
from megatron_switch.commands.inspect.t5_generation import conditioned_on
from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flag_name
from megatron_switch.models.sampling import (
    GREEDY,
    ModelForward,
    Sampling,
    generate_tokens,
    window_width,
)
from megatron_switch.moe.counter_rng import mix
from megatron_switch.training.inference.trained_model import TrainedModel, open_trained_model
from megatron_switch.training.logs.console import Console
from megatron_switch.utils.units import count_text

_STANDARD_INPUT = "-"
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what the first bytes of a character decode to
_SAMPLING_DEFAULTS = {"temperature": 0.8, "top_p": 0.9, "top_k": 0}


def generate(own: Namespace) -> None:
    """Print continuations as the flags of the command say.

    Raises:
        SwitchError: Prompt, checkpoint, tokenizer or flags cannot be used.
    """
    rank = int(os.environ.get("RANK", "0"))
    sampling, notes = _sampling(own)
    prompts = _prompts(own, rank)
    screen = sys.stdout
    with (
        redirect_stdout(sys.stderr),
        Console(None, rank=rank) as console,
        open_trained_model(own.load, own.train_flags, drop=own.drop) as model,
    ):
        if own.drop and not model.args.num_experts:
            notes = (*notes, "--drop has no effect: the model has no experts.")
        for note in (_summary(model), *notes, *model.notes):
            console.say(note)
        for number, prompt in enumerate(_of_first_rank(prompts)):
            tokens = model.tokenizer.built.tokenize(prompt)
            _note_length(console, model, len(tokens), own.num_tokens)
            pieces = continuation(
                model,
                tokens,
                num_tokens=own.num_tokens,
                sampling=sampling,
                seed=int(mix(own.seed, number)),
                full_window=own.drop,
            )
            separator = "\n" if number else ""
            shown = "" if model.answers else prompt
            for piece in chain([separator + shown], pieces, ["\n"]):
                if rank == 0:
                    print(piece, end="", file=screen, flush=True)


def continuation(
    model: TrainedModel,
    prompt_ids: Sequence[int],
    *,
    num_tokens: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    full_window: bool = False,
) -> Iterator[str]:
    """Continue or answer a prompt, yielding each piece of text as soon as it is complete.

    All ranks that share the model run this to its end, with the same arguments.

    Args:
        model: The model.
        prompt_ids: Tokens of the prompt, at least one.
        num_tokens: Tokens to add at most; the text ends earlier where the document does.
        sampling: How to choose each token.
        seed: Seed of the draws.
        full_window: Whether to feed the model its whole context from the first token on.

    Raises:
        ConfigError: The prompt has no token.
        CheckpointError: The model's scores are not numbers.
    """
    logits: ModelForward = model.logits
    shown_ids = prompt_ids
    if model.answers:
        answering = conditioned_on(
            model, prompt_ids, num_tokens=num_tokens, full_window=full_window
        )
        logits, window = answering.logits, answering.window
        prompt_ids, shown_ids = [answering.start], []
    else:
        width = window_width(
            len(prompt_ids) + num_tokens,
            context_length=model.context_length,
            multiple_of=model.width_multiple,
        )
        window = model.context_length if full_window else width
    tokens = generate_tokens(
        _following_first_rank(logits),
        prompt_ids,
        window=window,
        max_new_tokens=num_tokens,
        sampling=sampling,
        vocab_size=model.tokenizer.vocab_size,
        eod_id=model.tokenizer.eod,
        generator=torch.Generator().manual_seed(seed),
    )
    return text_pieces(model.tokenizer.built.detokenize, shown_ids, tokens)


def text_pieces(
    detokenize: Callable[[list[int]], str], prompt_ids: Sequence[int], tokens: Iterator[int]
) -> Iterator[str]:
    """Turn tokens that follow a prompt into text, one piece as soon as its characters are whole.

    A tokenizer decodes a token differently at the start of a text, so a piece is what the text
    grows by: decoded once with the tokens and once without, both times after those of the last
    piece.

    Args:
        detokenize: Returns the text of a list of tokens.
        prompt_ids: Tokens of the prompt.
        tokens: Tokens after it.

    Yields:
        Pieces; joined, they are the text after the prompt.
    """
    ids = list(prompt_ids)
    start, emitted = 0, len(ids)
    for token in tokens:
        ids.append(token)
        grown = detokenize(ids[start:])
        if grown.endswith(_INCOMPLETE):
            continue
        yield grown[len(detokenize(ids[start:emitted])) :]
        start, emitted = emitted, len(ids)
    if emitted < len(ids):  # the model never finished the character
        yield detokenize(ids[start:])[len(detokenize(ids[start:emitted])) :]


def _sampling(own: Namespace) -> tuple[Sampling, tuple[str, ...]]:
    """Return how to choose tokens, and notes about flags that have no effect.

    Raises:
        ConfigError: A number is out of range.
    """
    given = {name: getattr(own, name) for name in _SAMPLING_DEFAULTS}
    chosen: dict[str, Any] = {
        name: _SAMPLING_DEFAULTS[name] if value is None else value for name, value in given.items()
    }
    sampling = Sampling(**{**chosen, "top_k": chosen["top_k"] or None})
    if not own.greedy:
        return sampling, ()
    idle = [flag_name(name) for name, value in given.items() if value is not None]
    return GREEDY, tuple(f"{flag} has no effect with --greedy." for flag in idle)


def _prompts(own: Namespace, rank: int) -> list[str]:
    """Return the texts to continue; only the first rank reads files and standard input.

    Raises:
        ConfigError: There is none, or one cannot be read.
    """
    if not own.prompt and not own.prompt_file:
        raise ConfigError(
            "There is nothing to continue: give --prompt TEXT, --prompt - to read standard input, "
            "or --prompt-file FILE."
        )
    if rank != 0:
        return []
    typed = [
        _without_line_end(sys.stdin.read()) if prompt == _STANDARD_INPUT else prompt
        for prompt in own.prompt
    ]
    return typed + [_read(Path(name)) for name in own.prompt_file]


def _read(path: Path) -> str:
    try:
        return _without_line_end(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--prompt-file wants a UTF-8 text file, and {path} cannot be read: {error}."
        ) from error


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _of_first_rank(prompts: list[str]) -> list[str]:
    """Return the first rank's prompts on every rank."""
    box = [prompts]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box)
    return box[0]


def _following_first_rank(
    logits: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor]:
    """Replace the scores that the next token is chosen by with those of rank 0."""
    if dist.get_world_size() == 1:
        return logits

    def followed(tokens_BS: Tensor, padding_BS: Tensor) -> Tensor:
        logits_BSV = logits(tokens_BS, padding_BS)
        last = int((~padding_BS).sum()) - 1
        row_BV = logits_BSV[:, last].contiguous()
        dist.broadcast(row_BV, src=0)
        logits_BSV[:, last] = row_BV
        return logits_BSV

    return followed


def _summary(model: TrainedModel) -> str:
    args = model.args
    count = count_text(total_parameters(Architecture.from_args(args)).total)
    experts = f", {args.num_experts} experts" if args.num_experts else ""
    ranks = f", {args.world_size} ranks" if args.world_size > 1 else ""
    layers = f"{args.num_layers}"
    if model.answers:
        layers = f"{args.num_layers} encoder and {args.decoder_num_layers} decoder"
    return (
        f"{model.checkpoint.folder}: {count} parameters, {layers} layers{experts}; "
        f"{model.device}{ranks}"
    )


def _note_length(console: Console, model: TrainedModel, num_given: int, num_tokens: int) -> None:
    context = model.context_length
    if model.answers:
        if num_given + 1 > context:
            console.say(
                f"The prompt has {num_given} tokens, and the model was trained on inputs of "
                f"{context}, end token included: only the first {context - 1} are read."
            )
        return
    if num_given > context:
        console.say(
            f"The prompt has {num_given} tokens, and the model was trained on sequences of "
            f"{context}: only the last {context} are seen."
        )
    elif num_given + num_tokens > context:
        console.say(
            f"Prompt and continuation can grow to {num_given + num_tokens} tokens, and the model "
            f"was trained on sequences of {context}: each token is chosen from the last {context}."
        )
