"""The name map of encoder-decoder models: Megatron's T5 and Hugging Face's T5 and Switch.

Both stacks are described by the same entries. The inner width of attention, heads x channels, need
not be the model's width; heads are kept together in Megatron; and the relative positions of a stack
are one table, in Hugging Face's first block and beside Megatron's stack.

Gated units have two matrices, ``wi_0`` (through the nonlinearity) and ``wi_1``, as Switch-XXL and
T5 1.1 do. ``transformers`` has no gated Switch, so such a model is read and written by these names,
which are those of the original files, but opens in no stock class.
"""

from collections.abc import Iterator

from megatron_switch.architecture.model import Architecture
from megatron_switch.checkpoint.convert.name_map import (
    HfTensor,
    MapEntry,
    NameMap,
    expert_entries,
    plain,
)
from megatron_switch.checkpoint.convert.packing import Interleaved, PaddedRows

EMBEDDING = "shared.weight"
HEAD = "lm_head.weight"
_UNREAD = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""In the files of the first T5 models; attention to the encoder knows no relative positions."""
_EMBEDDING_ALIASES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def t5_name_map(model: Architecture, *, switch: bool, head: str = HEAD) -> NameMap:
    """Return the name map of an encoder-decoder model.

    Args:
        model: The model.
        switch: Whether the other side is Hugging Face's Switch, else its dense T5.
        head: Name of the head of an untied model; that of the embedding, where files leave it out.
    """
    return _T5(model, "mlp" if switch else "DenseReluDense", head).name_map()


class _T5:
    """Builds the map of one model."""

    def __init__(self, model: Architecture, mlp: str, head: str) -> None:
        self._model = model
        self._mlp = mlp
        self._head = head

    def name_map(self) -> NameMap:
        entries = list(self._ends())
        modules: list[str] = []
        expert_modules: list[tuple[str, int]] = []
        for name, stack in self._model.stacks.items():
            modules.append(f"{name}.final_layernorm")
            entries += self._stack_ends(name)
            for layer in range(stack.num_layers):
                ours, theirs = f"{name}.layers.{layer}.", f"{name}.block.{layer}.layer."
                entries += self._self_attention(ours, theirs + "0.")
                modules += [f"{ours}self_attention.{part}" for part in _SELF_ATTENTION]
                last = 1
                if name == "decoder":
                    entries += self._cross_attention(ours, theirs + "1.")
                    modules += [f"{ours}cross_attention.{part}" for part in _CROSS_ATTENTION]
                    modules.append(ours + "pre_cross_attn_layernorm")
                    last = 2
                if layer in stack.sparse_layers:
                    entries += self._sparse(ours, f"{theirs}{last}.")
                    modules.append(ours + "pre_mlp_layernorm")
                    expert_modules += [
                        (f"{ours}mlp.experts.experts.{linear}", self._model.num_experts)
                        for linear in _LINEARS
                    ]
                else:
                    entries += self._dense(ours, f"{theirs}{last}.")
                    modules += [f"{ours}mlp.{linear}" for linear in _LINEARS]
        modules += ["output_layer", "lm_head.output_layer"]
        return NameMap(tuple(entries), tuple(modules), tuple(expert_modules), unread=(_UNREAD,))

    def _ends(self) -> Iterator[MapEntry]:
        """Embedding and head."""
        model = self._model
        tied = model.share_embeddings_and_output_weights or self._head == EMBEDDING
        yield self._vocabulary(
            "embedding.word_embeddings.weight",
            EMBEDDING,
            aliases=(*_EMBEDDING_ALIASES, *((HEAD,) if tied else ())),
            # Without tied embeddings, transformers 5 initialises what a file omits.
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
    ) -> MapEntry:
        model = self._model
        part = HfTensor(name, (model.vocab_size, model.hidden_size), aliases, copies)
        packing = PaddedRows(model.vocab_size, model.padded_vocab_size)
        whole = (model.padded_vocab_size, model.hidden_size)
        return MapEntry(key, whole, (part,), packing, copies=also)

    def _stack_ends(self, stack: str) -> Iterator[MapEntry]:
        """Relative positions and last norm."""
        model = self._model
        yield plain(
            f"{stack}_relative_pos_emb.relative_attention_bias.weight",
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            (model.relative_attention_num_buckets, model.num_attention_heads),
        )
        yield self._norm(f"{stack}.final_layernorm.weight", f"{stack}.final_layer_norm")

    def _norm(self, key: str, name: str) -> MapEntry:
        return plain(key, f"{name}.weight", (self._model.hidden_size,))

    def _self_attention(self, ours: str, theirs: str) -> Iterator[MapEntry]:
        yield self._norm(
            ours + "self_attention.linear_qkv.layer_norm_weight", theirs + "layer_norm"
        )
        yield self._heads(ours + "self_attention.linear_qkv", theirs + "SelfAttention", "qkv")
        yield self._output(ours + "self_attention", theirs + "SelfAttention")

    def _cross_attention(self, ours: str, theirs: str) -> Iterator[MapEntry]:
        yield self._norm(ours + "pre_cross_attn_layernorm.weight", theirs + "layer_norm")
        yield self._heads(ours + "cross_attention.linear_q", theirs + "EncDecAttention", "q")
        yield self._heads(ours + "cross_attention.linear_kv", theirs + "EncDecAttention", "kv")
        yield self._output(ours + "cross_attention", theirs + "EncDecAttention")

    def _heads(self, ours: str, theirs: str, letters: str) -> MapEntry:
        model = self._model
        inner, width = model.query_projection_size, model.hidden_size
        parts = tuple(HfTensor(f"{theirs}.{letter}.weight", (inner, width)) for letter in letters)
        packing = Interleaved(model.num_attention_heads, (inner,) * len(letters))
        return MapEntry(f"{ours}.weight", (len(letters) * inner, width), parts, packing)

    def _output(self, ours: str, theirs: str) -> MapEntry:
        model = self._model
        inner = model.query_projection_size
        return plain(f"{ours}.linear_proj.weight", f"{theirs}.o.weight", (model.hidden_size, inner))

    def _first(self) -> tuple[str, ...]:
        return ("wi_0", "wi_1") if self._model.gated_linear_unit else ("wi",)

    def _dense(self, ours: str, theirs: str) -> Iterator[MapEntry]:
        model = self._model
        width, hidden = model.hidden_size, model.ffn_hidden_size
        yield self._norm(ours + "mlp.linear_fc1.layer_norm_weight", theirs + "layer_norm")
        mlp = f"{theirs}{self._mlp}."
        parts = tuple(HfTensor(f"{mlp}{name}.weight", (hidden, width)) for name in self._first())
        packing = Interleaved(1, (hidden,) * len(parts))
        yield MapEntry(ours + "mlp.linear_fc1.weight", (len(parts) * hidden, width), parts, packing)
        yield plain(ours + "mlp.linear_fc2.weight", mlp + "wo.weight", (width, hidden))

    def _sparse(self, ours: str, theirs: str) -> Iterator[MapEntry]:
        model = self._model
        width, hidden, count = model.hidden_size, model.moe_ffn_hidden_size, model.num_experts
        yield self._norm(ours + "pre_mlp_layernorm.weight", theirs + "layer_norm")
        router = theirs + "mlp.router.classifier.weight"
        yield plain(ours + "mlp.router.weight", router, (count, width))
        yield from expert_entries(
            ours + "mlp.experts.experts.",
            [f"{name}.weight" for name in (*self._first(), "wo")],
            [f"{theirs}mlp.experts.expert_{expert}." for expert in range(count)],
            width=width,
            hidden=hidden,
        )


_LINEARS = ("linear_fc1", "linear_fc2")
_SELF_ATTENTION = ("linear_qkv", "linear_proj")
_CROSS_ATTENTION = ("linear_q", "linear_kv", "linear_proj")
