"""How many rows the embedding has, the same in every layout.

Megatron pads the vocabulary to a multiple of ``--make-vocab-size-divisible-by`` times the
tensor-parallel size. The padding rows take part in the softmax, so a checkpoint loaded at
another tensor-parallel size gets other rows and another loss. Here the padded size is a
multiple of ``--make-vocab-size-divisible-by`` x 8 whatever the layout, and a
tensor-parallel size that does not divide it is refused.
"""

from megatron_switch.errors import CheckpointError, LayoutError

_ROWS_FACTOR = 8  # tensor-parallel sizes up to one node of 8 GPUs always divide the result


def padded_vocab_size(
    vocab_size: int,
    *,
    make_divisible_by: int = 128,
    tensor_parallel_size: int = 1,
    stored: int | None = None,
) -> int:
    """Return the number of embedding rows for a tokenizer.

    Args:
        vocab_size: Tokens that the tokenizer can produce.
        make_divisible_by: ``--make-vocab-size-divisible-by``.
        tensor_parallel_size: ``--tensor-model-parallel-size``; checked, never part of the result.
        stored: Padded size of the checkpoint that is loaded, if any. It wins, so that a
            checkpoint that stock Megatron padded in its own way keeps its rows and its loss.

    Raises:
        CheckpointError: The checkpoint has fewer rows than the tokenizer has tokens.
        LayoutError: The tensor-parallel size does not divide the rows.
    """
    multiple = make_divisible_by * _ROWS_FACTOR
    rows = -(-vocab_size // multiple) * multiple
    if stored is not None:
        if stored < vocab_size:
            raise CheckpointError(
                f"The tokenizer has {vocab_size} tokens, but the checkpoint's embedding has only "
                f"{stored} rows, so it was trained with another tokenizer. Give "
                "--tokenizer-model the one it was trained with."
            )
        rows = stored
    if rows % tensor_parallel_size != 0:
        sizes = [size for size in range(1, tensor_parallel_size) if rows % size == 0]
        raise LayoutError(
            f"{rows} vocabulary rows cannot be shared evenly by {tensor_parallel_size} "
            f"tensor-parallel ranks. Set --tensor-model-parallel-size to one of {sizes}"
            + (
                f", or --make-vocab-size-divisible-by to a multiple of {tensor_parallel_size}."
                if stored is None
                else "; the number of rows is fixed by the checkpoint."
            )
        )
    return rows
