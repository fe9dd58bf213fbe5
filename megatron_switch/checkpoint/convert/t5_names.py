"""The name table of encoder-decoder models: Megatron's T5 and Hugging Face's T5 and Switch.

Both stacks are described by the same rows; ``S`` below is ``encoder`` or ``decoder``. Attention has
more inner width than the model may have (heads x channels need not be the width), heads are kept
together in Megatron, and the relative positions of a stack are one table, in Hugging Face's first
block and beside Megatron's stack.

Gated units have two matrices, ``wi_0`` (through the nonlinearity) and ``wi_1``, as Switch-XXL and
T5 1.1 do. ``transformers`` has no gated Switch, so such a model is read and written by these names,
which are those of the original files, but opens in no stock class.
"""

from collections.abc import Iterator

from megatron_switch.architecture.model import Architecture
from megatron_switch.checkpoint.convert.name_map import NameTable, Part, Row, plain
from megatron_switch.checkpoint.convert.packing import Interleaved, PaddedRows

EMBEDDING = "shared.weight"
HEAD = "lm_head.weight"
_UNREAD = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""In the files of the first T5 models; attention to the encoder knows no relative positions."""
_EMBEDDING_ALIASES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def t5_table(model: Architecture, *, switch: bool, head: str = HEAD) -> NameTable:
    """Return the name table of an encoder-decoder model.

    Args:
        model: The model.
        switch: Whether the other side is Hugging Face's Switch, else its dense T5.
        head: Name of the head of an untied model; that of the embedding, where files leave it out.
    """
    return _T5(model, "mlp" if switch else "DenseReluDense", head).table()


class _T5:
    """Builds the table of one model."""

    def __init__(self, model: Architecture, mlp: str, head: str) -> None:
        self._model = model
        self._mlp = mlp
        self._head = head

    def table(self) -> NameTable:
        rows = list(self._ends())
        modules: list[str] = []
        expert_modules: list[tuple[str, int]] = []
        for name, stack in self._model.stacks.items():
            modules.append(f"{name}.final_layernorm")
            rows += self._stack_ends(name)
            for layer in range(stack.num_layers):
                ours, theirs = f"{name}.layers.{layer}.", f"{name}.block.{layer}.layer."
                rows += self._self_attention(ours, theirs + "0.")
                modules += [f"{ours}self_attention.{part}" for part in _SELF_ATTENTION]
                last = 1
                if name == "decoder":
                    rows += self._cross_attention(ours, theirs + "1.")
                    modules += [f"{ours}cross_attention.{part}" for part in _CROSS_ATTENTION]
                    modules.append(ours + "pre_cross_attn_layernorm")
                    last = 2
                if layer in stack.sparse_layers:
                    rows += self._sparse(ours, f"{theirs}{last}.")
                    modules.append(ours + "pre_mlp_layernorm")
                    expert_modules += [
                        (f"{ours}mlp.experts.experts.{linear}", self._model.num_experts)
                        for linear in _LINEARS
                    ]
                else:
                    rows += self._dense(ours, f"{theirs}{last}.")
                    modules += [f"{ours}mlp.{linear}" for linear in _LINEARS]
        modules += ["output_layer", "lm_head.output_layer"]
        return NameTable(tuple(rows), tuple(modules), tuple(expert_modules), unread=(_UNREAD,))

    def _ends(self) -> Iterator[Row]:
        """Embedding and head."""
        model = self._model
        tied = model.share_embeddings_and_output_weights or self._head == EMBEDDING
        yield self._vocabulary(
            "embedding.word_embeddings.weight",
            EMBEDDING,
            aliases=(*_EMBEDDING_ALIASES, *((HEAD,) if tied else ())),
            # Where it is not told to tie, transformers 5 draws anew what a file leaves out.
            copies=() if model.share_embeddings_and_output_weights else _EMBEDDING_ALIASES,
        )
        if not model.share_embeddings_and_output_weights:
            keys = ("output_layer.weight", "lm_head.output_layer.weight")
            yield self._vocabulary(keys[0], self._head, also=keys[1:])

    def _vocabulary(
        self,
        key: str,
        name: str,
        aliases: tuple[str, ...] = (),
        copies: tuple[str, ...] = (),
        also: tuple[str, ...] = (),
    ) -> Row:
        model = self._model
        part = Part(name, (model.vocab_size, model.hidden_size), aliases, copies)
        packing = PaddedRows(model.vocab_size, model.padded_vocab_size)
        whole = (model.padded_vocab_size, model.hidden_size)
        return Row(key, whole, (part,), packing, copies=also)

    def _stack_ends(self, stack: str) -> Iterator[Row]:
        """Relative positions and last norm."""
        model = self._model
        yield plain(
            f"{stack}_relative_pos_emb.relative_attention_bias.weight",
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            (model.relative_attention_num_buckets, model.num_attention_heads),
        )
        yield self._norm(f"{stack}.final_layernorm.weight", f"{stack}.final_layer_norm")

    def _norm(self, key: str, name: str) -> Row:
        return plain(key, f"{name}.weight", (self._model.hidden_size,))

    def _self_attention(self, ours: str, theirs: str) -> Iterator[Row]:
        yield self._norm(
            ours + "self_attention.linear_qkv.layer_norm_weight", theirs + "layer_norm"
        )
        yield self._heads(ours + "self_attention.linear_qkv", theirs + "SelfAttention", "qkv")
        yield self._output(ours + "self_attention", theirs + "SelfAttention")

    def _cross_attention(self, ours: str, theirs: str) -> Iterator[Row]:
        yield self._norm(ours + "pre_cross_attn_layernorm.weight", theirs + "layer_norm")
        yield self._heads(ours + "cross_attention.linear_q", theirs + "EncDecAttention", "q")
        yield self._heads(ours + "cross_attention.linear_kv", theirs + "EncDecAttention", "kv")
        yield self._output(ours + "cross_attention", theirs + "EncDecAttention")

    def _heads(self, ours: str, theirs: str, letters: str) -> Row:
        model = self._model
        inner, width = model.query_projection_size, model.hidden_size
        parts = tuple(Part(f"{theirs}.{letter}.weight", (inner, width)) for letter in letters)
        packing = Interleaved(model.num_attention_heads, (inner,) * len(letters))
        return Row(f"{ours}.weight", (len(letters) * inner, width), parts, packing)

    def _output(self, ours: str, theirs: str) -> Row:
        model = self._model
        inner = model.query_projection_size
        return plain(f"{ours}.linear_proj.weight", f"{theirs}.o.weight", (model.hidden_size, inner))

    def _first(self) -> tuple[str, ...]:
        return ("wi_0", "wi_1") if self._model.gated_linear_unit else ("wi",)

    def _dense(self, ours: str, theirs: str) -> Iterator[Row]:
        model = self._model
        width, hidden = model.hidden_size, model.ffn_hidden_size
        yield self._norm(ours + "mlp.linear_fc1.layer_norm_weight", theirs + "layer_norm")
        mlp = f"{theirs}{self._mlp}."
        parts = tuple(Part(f"{mlp}{name}.weight", (hidden, width)) for name in self._first())
        packing = Interleaved(1, (hidden,) * len(parts))
        yield Row(ours + "mlp.linear_fc1.weight", (len(parts) * hidden, width), parts, packing)
        yield plain(ours + "mlp.linear_fc2.weight", mlp + "wo.weight", (width, hidden))

    def _sparse(self, ours: str, theirs: str) -> Iterator[Row]:
        model = self._model
        width, hidden, count = model.hidden_size, model.moe_ffn_hidden_size, model.num_experts
        yield self._norm(ours + "pre_mlp_layernorm.weight", theirs + "layer_norm")
        router = theirs + "mlp.router.classifier.weight"
        yield plain(ours + "mlp.router.weight", router, (count, width))
        key = ours + "mlp.experts.experts.linear_fc{}.weight"
        for expert in range(count):
            prefix = f"{theirs}mlp.experts.expert_{expert}."
            parts = tuple(Part(f"{prefix}{name}.weight", (hidden, width)) for name in self._first())
            packing = Interleaved(1, (hidden,) * len(parts))
            stack = (count, len(parts) * hidden, width)
            yield Row(key.format(1), stack, parts, packing, expert)
            yield Row(
                key.format(2),
                (count, width, hidden),
                (Part(prefix + "wo.weight", (width, hidden)),),
                Interleaved(1, (width,)),
                expert,
            )


_LINEARS = ("linear_fc1", "linear_fc2")
_SELF_ATTENTION = ("linear_qkv", "linear_proj")
_CROSS_ATTENTION = ("linear_q", "linear_kv", "linear_proj")
