"""Defaults and checks of the flags of an encoder-decoder (``--switch-arch t5``).

Sizes. ``--num-layers`` is the depth of both stacks; ``--encoder-num-layers`` and
``--decoder-num-layers`` set them apart. ``--seq-length`` (or ``--encoder-seq-length``) is the
encoder's length, ``--decoder-seq-length`` the decoder's. Megatron keeps the encoder's under
``num_layers`` and ``seq_length``, and so do we.

Data. With span corruption ``--decoder-seq-length`` has a default: what the targets take, rounded up
to a multiple of 16, so that tensor-parallel ranks can share it. Pairs of texts need it.

Defaults become T5's (RMSNorm, no biases, no positions but the relative attention bias, embedding
drawn with deviation 1). Where that is what T5 *is*, another explicit value is refused.
"""

from argparse import Namespace

from megatron_switch.architecture.layer_pattern import stacks_of
from megatron_switch.architecture.model import T5_ARGUMENTS
from megatron_switch.data.span_corruption import plan_spans
from megatron_switch.errors import ConfigError, LayoutError
from megatron_switch.flags.argv import flag_name
from megatron_switch.models.t5_layers import PIPELINE_REFUSAL
from megatron_switch.training.arguments.data_flags import check_pair_paths, reads_pairs
from megatron_switch.training.arguments.parser import CommandLine

_DEFAULTS: dict[str, object] = {
    **T5_ARGUMENTS,
    "embedding_init_method_std": 1.0,
    # These kernels know gelu and silu only.
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
}
_POSITIONS = ("none", "relative")
_DECODER_MULTIPLE = 16
_REFUSED = {
    "swiglu": "The nonlinearity of a t5 is that of --switch-activation.",
    "squared_relu": "The nonlinearity of a t5 is that of --switch-activation.",
    "quick_geglu": "The nonlinearity of a t5 is that of --switch-activation.",
    "openai_gelu": "The nonlinearity of a t5 is that of --switch-activation.",
    "calculate_per_token_loss": "Megatron would divide the routers' losses, which count the tokens "
    "of encoder and decoder, by the decoder's alone.",
    "log_throughput": "Megatron counts the operations of a decoder-only model.",
    "log_progress": "Megatron counts the operations of a decoder-only model.",
    "reset_position_ids": "A t5 has no positions.",
    "reset_attention_mask": "A sample of a t5 is one sequence.",
    "eod_mask_loss": "The loss counts the whole target.",
    "full_validation": "Say how much to read with --eval-iters.",
    "multiple_validation_sets": "Give one validation set.",
}


def fill_t5(line: CommandLine) -> None:
    """Set what a t5 needs and was not given, in place.

    Args:
        line: The parsed command line.

    Raises:
        ConfigError: Sizes contradict each other, or an explicit value is not a t5's.
    """
    args = line.args
    for name, value in _DEFAULTS.items():
        if name not in line.settled:
            setattr(args, name, value)
    if "position_embedding_type" in line.settled and args.position_embedding_type not in (
        _POSITIONS
    ):
        raise ConfigError(
            "The positions of a t5 are in its relative attention bias, got "
            f"--position-embedding-type {args.position_embedding_type}. Leave it out."
        )
    # Megatron requires Transformer Engine for "relative"; the bias here needs none.
    args.position_embedding_type = "none"
    _fill_depths(args)
    _fill_lengths(args)


def check_t5(args: Namespace) -> None:
    """Refuse what a t5 cannot do, before anything is built.

    Raises:
        ConfigError: A flag has no meaning for a t5, or a size is missing.
        LayoutError: The layout has pipeline or context parallelism, or does not divide a length.
    """
    if args.pipeline_model_parallel_size > 1:
        raise LayoutError(PIPELINE_REFUSAL.format(args.pipeline_model_parallel_size))
    if args.context_parallel_size > 1:
        raise LayoutError(
            "--switch-arch t5 has no context parallelism, got --context-parallel-size "
            f"{args.context_parallel_size}: its attention bias needs whole sequences. Leave it out."
        )
    for name, reason in _REFUSED.items():
        if getattr(args, name):
            raise ConfigError(
                f"{flag_name(name)} cannot be used with --switch-arch t5. {reason} Leave it out."
            )
    if args.num_experts:
        stacks_of(args)
    check_pair_paths(args)
    length, size = args.decoder_seq_length, args.tensor_model_parallel_size
    if args.sequence_parallel and length % size:
        raise LayoutError(
            f"Sequence parallelism shares the decoder's positions evenly, but --decoder-seq-length "
            f"{length} is no multiple of --tensor-model-parallel-size {size}. Change either."
        )


def _fill_depths(args: Namespace) -> None:
    if args.num_layers is not None and args.encoder_num_layers is not None:
        raise ConfigError(
            f"The encoder's depth is given twice: --num-layers {args.num_layers} and "
            f"--encoder-num-layers {args.encoder_num_layers}. Leave one of them out."
        )
    if args.num_layers is None:
        args.num_layers = args.encoder_num_layers
    args.encoder_num_layers = None  # Megatron fills it in
    if args.decoder_num_layers is None:
        args.decoder_num_layers = args.num_layers


def _fill_lengths(args: Namespace) -> None:
    if args.seq_length is not None and args.encoder_seq_length is not None:
        raise ConfigError(
            f"The encoder's length is given twice: --seq-length {args.seq_length} and "
            f"--encoder-seq-length {args.encoder_seq_length}. Leave one of them out."
        )
    if args.seq_length is None:
        args.seq_length = args.encoder_seq_length
    args.encoder_seq_length = None
    if args.seq_length is None:
        return
    if args.decoder_seq_length is None:
        if reads_pairs(args):
            raise ConfigError(
                "Pairs of texts need room for their targets: give --decoder-seq-length, in tokens."
            )
        plan = plan_spans(
            source_length=args.seq_length,
            target_length=None,
            density=args.switch_span_density,
            mean_length=args.switch_span_length,
        )
        args.decoder_seq_length = -(-plan.target // _DECODER_MULTIPLE) * _DECODER_MULTIPLE
    if args.max_position_embeddings is None:  # there is no table of positions
        args.max_position_embeddings = max(args.seq_length, args.decoder_seq_length)
