"""The flags of the commands that rewrite checkpoints, apart from what the commands need.

Torch and Megatron take seconds to import, and a help text or a mistyped flag must not wait for
them. What is named here of the code behind, its tests compare with it.
"""

import math
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path

from megatron_switch.commands.argument_types import count

DTYPE_NAMES = ("keep", "bf16", "fp32")
MODEL_TYPES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "switch_gpt",
    "switch_transformers",
    "t5",
)
RESHARD_SIZES = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "expert-model-parallel-size": "ep",
    "expert-tensor-parallel-size": "etp",
}
"""Flags of reshard, and the names of :class:`~megatron_switch.layout.grid.Layout` for them."""


def convert_parser() -> ArgumentParser:
    """Return the parser of ``megatron-switch convert``; ``action`` is the word it begins with."""
    parser = ArgumentParser(
        prog="megatron-switch convert",
        description="Convert checkpoints between Hugging Face's format and Megatron's, one tensor "
        "at a time, without building a model.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")

    action = actions.add_parser("hf-to-megatron", help="write a Megatron checkpoint")
    _folders(action)
    _common(action)
    action.add_argument(
        "--vocab-multiple",
        type=count,
        metavar="N",
        default=8,
        help="pad the vocabulary with rows of zeros to a multiple of this (default: %(default)s, "
        "which every tensor-parallel size up to 8 divides)",
    )
    action.add_argument(
        "--workers",
        type=count,
        default=1,
        metavar="N",
        help="threads; memory grows with them (default: 1)",
    )

    action = actions.add_parser("megatron-to-hf", help="write a folder in Hugging Face's format")
    _folders(action)
    _common(action)
    action.add_argument("--iteration", type=int, help="default: the newest one")
    action.add_argument(
        "--architecture",
        choices=("auto", *MODEL_TYPES),
        default="auto",
        help="model type to write; auto takes a stock one that computes the same where there is "
        "one (default)",
    )
    action.add_argument(
        "--vocab-size",
        type=count,
        metavar="N",
        help="rows of the embedding (default: without the padding that a run added)",
    )
    action.add_argument("--tokenizer-model", help="where the tokenizer is now, if it was moved")
    action.add_argument("--no-tokenizer", action="store_true", help="write no tokenizer")

    action = actions.add_parser("inspect", help="say what a folder holds")
    action.add_argument("folder", type=Path, metavar="DIR")

    action = actions.add_parser("verify", help="compare the two sides")
    _folders(action)
    action.add_argument(
        "--tensors-only",
        action="store_true",
        help="compare tensors only, one at a time, without building either model",
    )
    return parser


def _folders(parser: ArgumentParser) -> None:
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR")
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR")


def _common(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=DTYPE_NAMES, default="keep", help="type of the weights (default: keep)"
    )


def reshard_parser() -> ArgumentParser:
    """Return the parser of ``megatron-switch reshard``."""
    parser = ArgumentParser(
        prog="megatron-switch reshard",
        description="Rewrite a checkpoint for another layout, weights and optimizer moments "
        "together, in one process and without a model.",
    )
    parser.add_argument("--load", type=Path, required=True, metavar="DIR")
    parser.add_argument("--save", type=Path, required=True, metavar="DIR")
    parser.add_argument("--iteration", type=int, help="default: the newest one")
    for flag in RESHARD_SIZES:
        parser.add_argument(f"--{flag}", type=count, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--decoder-first-pipeline-num-layers",
        dest="first",
        type=int,
        metavar="N",
        help="layers of the first pipeline stage (default: as many as any other)",
    )
    parser.add_argument(
        "--decoder-last-pipeline-num-layers",
        dest="last",
        type=int,
        metavar="N",
        help="of the last one",
    )
    parser.add_argument(
        "--pipeline-model-parallel-layout",
        dest="spelled",
        metavar="Ett|ttL",
        help="layers of every stage, in Megatron's letters",
    )
    parser.add_argument(
        "--world-size",
        type=count,
        metavar="N",
        help="ranks of the next run (default: the fewest that the sizes need)",
    )
    parser.add_argument(
        "--workers",
        type=count,
        default=1,
        metavar="N",
        help="threads; memory grows with them (default: 1)",
    )
    return parser


def upcycle_parser() -> ArgumentParser:
    """Return the parser of ``megatron-switch upcycle``."""
    parser = ArgumentParser(
        prog="megatron-switch upcycle",
        description="Turn a dense model into a Switch model whose experts begin as its MLPs.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--load", type=Path, metavar="DIR", help="a Megatron checkpoint")
    source.add_argument("--hf", type=Path, metavar="DIR", help="Hugging Face's Llama, Qwen or T5")
    parser.add_argument("--save", type=Path, required=True, metavar="DIR")
    parser.add_argument("--num-experts", type=count, required=True, metavar="E")
    parser.add_argument(
        "--moe-layer-freq",
        metavar="[0,1,...]",
        help="which layers get experts, of both stacks where there are two (default: every second)",
    )
    parser.add_argument(
        "--switch-decoder-layer-freq",
        metavar="[0,1,...]",
        help="which layers of an encoder-decoder's decoder do, where they are others",
    )
    parser.add_argument(
        "--scale",
        choices=("none", "sqrt_e"),
        default="none",
        help="none: plain copies. sqrt_e: two factors sqrt(E) undo the gate of a uniform router",
    )
    parser.add_argument(
        "--router-scale",
        type=_scale,
        default=0.1,
        metavar="S",
        help="--switch-init-scale of the new routers; 0 makes them zero (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1234, help="of the routers")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="report the first loss on this text"
    )
    parser.add_argument(
        "--workers", type=count, default=1, metavar="N", help="threads (default: 1)"
    )
    return parser


def _scale(text: str) -> float:
    """Return a number from 0 up, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"takes a number, 0 or more, got '{text}'")
    return value
