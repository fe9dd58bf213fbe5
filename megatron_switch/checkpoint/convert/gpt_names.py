"""The name table of decoder-only models: Megatron's GPT and layouts in Hugging Face's format.

One table serves all of them, because they differ in little: what a sparse layer's router and
experts are called. Llama, Qwen2 and Qwen3 are the table without experts; Qwen2-MoE and Qwen3-MoE
are stock architectures of ``transformers`` that can compute a Switch layer without capacity;
``switch_gpt`` is this project's own layout, for what no stock architecture expresses (biases,
LayerNorm, learned positions, ungated units). docs/checkpoints.md describes it. Frequencies of
rotary positions, which old files store, are computed from the configuration everywhere.

Shape letters:

    V vocabulary    D model    F, H hidden width of dense MLPs, of experts    E experts
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_switch.architecture.model import Architecture
from megatron_switch.checkpoint.convert.name_map import NameTable, Part, Row, plain
from megatron_switch.checkpoint.convert.packing import Interleaved, PaddedRows


@dataclass(frozen=True)
class ExpertNames:
    """What a layout calls the parts of a sparse layer, behind ``model.layers.N.mlp.``."""

    router: str
    expert: str
    """Prefix of one expert, with its index in braces."""
    gated: tuple[str, str, str]
    """Gate, up and down projections."""
    ungated: tuple[str, str] | None = None
    """The two matrices of a unit without a gate, where the layout has such units."""
    shared_expert: bool = False
    """Whether the format demands a shared expert, which then has width 0."""


QWEN_EXPERTS = ExpertNames(
    "gate.weight", "experts.{}.", ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
)
QWEN2_EXPERTS = ExpertNames(
    QWEN_EXPERTS.router, QWEN_EXPERTS.expert, QWEN_EXPERTS.gated, shared_expert=True
)
SWITCH_EXPERTS = ExpertNames(
    "router.classifier.weight",
    "experts.expert_{}.",
    ("wi_0.weight", "wi_1.weight", "wo.weight"),
    ungated=("wi.weight", "wo.weight"),
)


def gpt_table(model: Architecture, experts: ExpertNames = SWITCH_EXPERTS) -> NameTable:
    """Return the name table of a decoder-only model."""
    return _Gpt(model, experts).table()


class _Gpt:
    """Builds the table of one model."""

    def __init__(self, model: Architecture, experts: ExpertNames) -> None:
        self._model = model
        self._names = experts

    def table(self) -> NameTable:
        model = self._model
        rows = list(self._ends())
        modules, expert_modules, inert = ["decoder.final_layernorm"], [], []
        layers = range(model.decoder.num_layers)
        unread = tuple(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in layers)
        for layer in layers:
            ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
            rows += self._attention(ours + "self_attention.", theirs)
            parts = ["linear_qkv", "linear_proj", "core_attention"]
            modules += [f"{ours}self_attention.{part}" for part in parts]
            if model.qk_layernorm:
                modules += [f"{ours}self_attention.{part}_layernorm" for part in "qk"]
            if layer in model.decoder.sparse_layers:
                rows += self._sparse(ours, theirs)
                modules.append(ours + "pre_mlp_layernorm")
                expert_modules += [
                    (f"{ours}mlp.experts.experts.{linear}", model.num_experts)
                    for linear in ("linear_fc1", "linear_fc2")
                ]
                inert += self._inert(theirs + "mlp.")
            else:
                rows += self._dense(ours + "mlp.", theirs)
                modules += [f"{ours}mlp.{linear}" for linear in ("linear_fc1", "linear_fc2")]
        return NameTable(tuple(rows), tuple(modules), tuple(expert_modules), tuple(inert), unread)

    def _ends(self) -> Iterator[Row]:
        """Embedding, last norm and head."""
        model = self._model
        head = "lm_head.weight"
        yield self._vocabulary(
            "embedding.word_embeddings.weight",
            "model.embed_tokens.weight",
            aliases=(head,) if model.share_embeddings_and_output_weights else (),
        )
        if model.learned_positions:
            name = "model.embed_positions.weight"
            key = "embedding.position_embeddings.weight"
            yield plain(key, name, (model.learned_positions, model.hidden_size))
        yield from self._norm("decoder.final_layernorm.", "model.norm.", model.hidden_size)
        if not model.share_embeddings_and_output_weights:
            yield self._vocabulary("output_layer.weight", head)

    def _vocabulary(self, key: str, name: str, aliases: tuple[str, ...] = ()) -> Row:
        model = self._model
        part = Part(name, (model.vocab_size, model.hidden_size), aliases)
        packing = PaddedRows(model.vocab_size, model.padded_vocab_size)
        return Row(key, (model.padded_vocab_size, model.hidden_size), (part,), packing)

    def _norm(self, ours: str, theirs: str, width: int) -> list[Row]:
        kinds = ["weight"] + ["bias"] * (self._model.normalization == "LayerNorm")
        return [plain(ours + kind, theirs + kind, (width,)) for kind in kinds]

    def _attention(self, ours: str, theirs: str) -> Iterator[Row]:
        model = self._model
        width, channels = model.hidden_size, model.kv_channels
        queries, keys = model.query_projection_size, model.kv_projection_size
        yield from self._norm(ours + "linear_qkv.layer_norm_", theirs + "input_layernorm.", width)
        packing = Interleaved(model.num_query_groups, (queries, keys, keys))
        kinds: list[tuple[str, tuple[int, ...]]] = [("weight", (width,))]
        if model.add_qkv_bias or model.add_bias_linear:
            kinds.append(("bias", ()))
        for kind, rest in kinds:
            parts = tuple(
                Part(f"{theirs}self_attn.{name}_proj.{kind}", (rows, *rest))
                for name, rows in zip("qkv", packing.rows, strict=True)
            )
            key = f"{ours}linear_qkv.{kind}"
            yield Row(key, (queries + 2 * keys, *rest), parts, packing)
        if model.qk_layernorm:
            for name in "qk":
                key, other = f"{ours}{name}_layernorm.", f"{theirs}self_attn.{name}_norm."
                yield from self._norm(key, other, channels)
        output = theirs + "self_attn.o_proj."
        yield plain(ours + "linear_proj.weight", output + "weight", (width, queries))
        if model.add_bias_linear:
            yield plain(ours + "linear_proj.bias", output + "bias", (width,))

    def _dense(self, ours: str, theirs: str) -> Iterator[Row]:
        model = self._model
        width, hidden = model.hidden_size, model.ffn_hidden_size
        norm = theirs + "post_attention_layernorm."
        yield from self._norm(ours + "linear_fc1.layer_norm_", norm, width)
        first = ["gate_proj", "up_proj"] if model.gated_linear_unit else ["up_proj"]
        packing = Interleaved(1, (hidden,) * len(first))
        kinds: list[tuple[str, tuple[int, ...]]] = [("weight", (width,))]
        if model.add_bias_linear:
            kinds.append(("bias", ()))
        for kind, rest in kinds:
            parts = tuple(Part(f"{theirs}mlp.{name}.{kind}", (hidden, *rest)) for name in first)
            yield Row(f"{ours}linear_fc1.{kind}", (len(first) * hidden, *rest), parts, packing)
        yield plain(ours + "linear_fc2.weight", theirs + "mlp.down_proj.weight", (width, hidden))
        if model.add_bias_linear:
            yield plain(ours + "linear_fc2.bias", theirs + "mlp.down_proj.bias", (width,))

    def _sparse(self, ours: str, theirs: str) -> Iterator[Row]:
        model, names = self._model, self._names
        width, hidden, count = model.hidden_size, model.moe_ffn_hidden_size, model.num_experts
        norm = theirs + "post_attention_layernorm."
        yield from self._norm(ours + "pre_mlp_layernorm.", norm, width)
        router = f"{theirs}mlp.{names.router}"
        yield plain(ours + "mlp.router.weight", router, (count, width))
        unit = names.gated if model.gated_linear_unit else names.ungated
        assert unit, "a layout without such units was chosen for a model that has them"
        *first, last = unit
        packing = Interleaved(1, (hidden,) * len(first))
        key = ours + "mlp.experts.experts.linear_fc{}.weight"
        for expert in range(count):
            prefix = f"{theirs}mlp.{names.expert.format(expert)}"
            parts = tuple(Part(prefix + name, (hidden, width)) for name in first)
            stack = (count, len(first) * hidden, width)
            yield Row(key.format(1), stack, parts, packing, expert)
            yield Row(
                key.format(2),
                (count, width, hidden),
                (Part(prefix + last, (width, hidden)),),
                Interleaved(1, (width,)),
                expert,
            )

    def _inert(self, theirs: str) -> list[Part]:
        if not self._names.shared_expert:
            return []
        width = self._model.hidden_size
        shapes = {"gate_proj": (0, width), "up_proj": (0, width), "down_proj": (width, 0)}
        parts = [
            Part(f"{theirs}shared_expert.{name}.weight", shape) for name, shape in shapes.items()
        ]
        return [*parts, Part(theirs + "shared_expert_gate.weight", (1, width))]
