"""The tokens that prefer each expert of a trained model.

Text of the training data goes through the model once, without dropping a token, and the last sparse
layer's choices are counted against the tokens that it chose for.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list
from rich.console import Console as Screen
from rich.table import Table
from torch import Tensor

from megatron_switch.architecture.model import Architecture
from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.data.indexed_files import check_indexed_dataset
from megatron_switch.errors import ConfigError, DataError
from megatron_switch.moe.metrics.token_lift import TokenLift, highest_lifts
from megatron_switch.moe.router import SwitchRouter
from megatron_switch.moe.routing import RoutedTokens
from megatron_switch.training.arguments.data_flags import data_entries
from megatron_switch.training.inference.trained_model import TrainedModel, open_trained_model
from megatron_switch.training.logs.console import Console
from megatron_switch.utils.progress import steps_progress


def report_experts(own: Namespace) -> None:
    """Print a table of experts and the tokens that prefer them.

    Raises:
        SwitchError: The checkpoint, its data or the flags cannot be used.
    """
    screen = sys.stdout
    with (
        redirect_stdout(sys.stderr),
        Console(None, rank=0),
        open_trained_model(own.load, own.train_flags) as model,
    ):
        token_T, expert_T = observe(model, own.sequences)
        lifts = highest_lifts(
            token_T,
            expert_T,
            num_experts=model.args.num_experts,
            num_tokens=own.num_tokens,
            min_count=own.min_count,
        )
        table = expert_table(model, lifts, expert_T, min_count=own.min_count)
    Screen(file=screen).print(table)


def observe(model: TrainedModel, num_sequences: int) -> tuple[Tensor, Tensor]:
    """Return tokens of the training data and the expert that the last sparse layer chose for each.

    Args:
        model: A model on one rank.
        num_sequences: Sequences to read, spread evenly over the data.

    Returns:
        Two tensors of shape (T,), int64.

    Raises:
        ConfigError: The model has no experts, or is spread over ranks.
        DataError: The data that the checkpoint names cannot be read.
    """
    if model.answers:
        raise ConfigError(
            "The experts of an encoder-decoder (--switch-arch t5) cannot be looked at: tokens of "
            "input and target go different ways. Its load is in the run's metrics file."
        )
    routers = [module for module in model.module.modules() if isinstance(module, SwitchRouter)]
    if not routers:
        raise ConfigError("The model has no experts to look at: it was trained without any.")
    if model.args.world_size > 1:
        raise ConfigError(
            f"Experts are looked at on one rank, got {model.args.world_size}. Run the command "
            "without a launcher: a checkpoint opens in any layout."
        )
    sequences = list(_sequences(model, num_sequences))
    tokens, experts = [], []
    with (
        _chosen_by(routers[-1]) as chosen,
        steps_progress("reading sequences", len(sequences)) as advance,
    ):
        for tokens_S in sequences:
            tokens_BS = tokens_S.unsqueeze(0)
            model.logits(tokens_BS, torch.zeros_like(tokens_BS, dtype=torch.bool))
            tokens.append(tokens_S)
            experts.append(chosen.pop())
            advance()
    return torch.cat(tokens), torch.cat(experts)


def expert_table(
    model: TrainedModel, lifts: list[list[TokenLift]], expert_T: Tensor, *, min_count: int
) -> Table:
    """Return one row an expert: its share of tokens, and the tokens that prefer it."""
    layer = Architecture.from_args(model.args).sparse_layer_numbers[-1]
    table = Table(
        "expert",
        "share",
        "tokens of the highest lift, and how much of each comes here",
        title=f"Experts of layer {layer}, the last sparse one. Lift is how many times more often a "
        f"token comes here than tokens in general; tokens seen {min_count} times or more, equal "
        "lifts by count.",
        title_justify="left",
    )
    for expert, best in enumerate(lifts):
        share = (expert_T == expert).double().mean().item()
        tokens = "  ".join(
            f"{_shown(model, one.token)} {one.share:.0%} ({one.lift:.1f}x)" for one in best
        )
        table.add_row(str(expert), f"{share:.1%}", tokens or "none stands out")
    return table


@contextmanager
def _chosen_by(router: SwitchRouter) -> Iterator[list[Tensor]]:
    """Collect the experts that a router chooses while the block runs."""
    chosen: list[Tensor] = []

    def keep(_: torch.nn.Module, __: Any, output: tuple[RoutedTokens, Tensor]) -> None:
        chosen.append(output[0].routing.expert_T.cpu())

    handle = router.register_forward_hook(keep)
    try:
        yield chosen
    finally:
        handle.remove()


def _sequences(model: TrainedModel, num_sequences: int) -> Iterator[Tensor]:
    """Yield the middle of documents, as many tokens as the context holds."""
    named = data_entries(model.args)
    if not named:
        stored = read_common_state(model.checkpoint.folder).get("args")
        named = {} if stored is None else data_entries(stored)
    blend = named.get("data_path") or named.get("train_data_path")
    if not blend:
        raise DataError(
            "There is no text to look at: the checkpoint names no data. Give the prepared data "
            "with --data-path."
        )
    prefixes, _ = get_blend_from_list(blend)
    check_indexed_dataset(prefixes[0], vocab_size=model.tokenizer.vocab_size)
    data = IndexedDataset(prefixes[0])
    count = min(num_sequences, len(data))
    for document in (number * len(data) // count for number in range(count)):
        length = int(data.sequence_lengths[document])
        width = min(model.context_length, length)
        tokens = data.get(document, offset=(length - width) // 2, length=width)
        yield torch.from_numpy(tokens.astype("int64"))


def _shown(model: TrainedModel, token: int) -> str:
    """Return a token for reading: quoted, so that spaces and line ends can be seen."""
    return repr(model.tokenizer.built.detokenize([token]))
