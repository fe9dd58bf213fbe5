"""The name map of decoder-only models: Megatron's GPT and layouts in Hugging Face's format.

One map serves all of them, because they differ in little: what a sparse layer's router and
experts are called. Llama, Qwen2 and Qwen3 are the map without experts; Qwen2-MoE and Qwen3-MoE
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
from megatron_switch.checkpoint.convert.name_map import (
    HfTensor,
    MapEntry,
    NameMap,
    expert_entries,
    plain,
)
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


def gpt_name_map(model: Architecture, experts: ExpertNames = SWITCH_EXPERTS) -> NameMap:
    """Return the name map of a decoder-only model."""
    return _Gpt(model, experts).name_map()


class _Gpt:
    """Builds the map of one model."""

    def __init__(self, model: Architecture, experts: ExpertNames) -> None:
        self._model = model
        self._names = experts

    def name_map(self) -> NameMap:
        model = self._model
        entries = list(self._ends())
        modules, expert_modules, inert = ["decoder.final_layernorm"], [], []
        layers = range(model.decoder.num_layers)
        unread = tuple(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in layers)
        for layer in layers:
            ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
            entries += self._attention(ours + "self_attention.", theirs)
            parts = ["linear_qkv", "linear_proj", "core_attention"]
            modules += [f"{ours}self_attention.{part}" for part in parts]
            if model.qk_layernorm:
                modules += [f"{ours}self_attention.{part}_layernorm" for part in "qk"]
            if layer in model.decoder.sparse_layers:
                entries += self._sparse(ours, theirs)
                modules.append(ours + "pre_mlp_layernorm")
                expert_modules += [
                    (f"{ours}mlp.experts.experts.{linear}", model.num_experts)
                    for linear in ("linear_fc1", "linear_fc2")
                ]
                inert += self._inert(theirs + "mlp.")
            else:
                entries += self._dense(ours + "mlp.", theirs)
                modules += [f"{ours}mlp.{linear}" for linear in ("linear_fc1", "linear_fc2")]
        return NameMap(tuple(entries), tuple(modules), tuple(expert_modules), tuple(inert), unread)

    def _ends(self) -> Iterator[MapEntry]:
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

    def _vocabulary(self, key: str, name: str, aliases: tuple[str, ...] = ()) -> MapEntry:
        model = self._model
        part = HfTensor(name, (model.vocab_size, model.hidden_size), aliases)
        packing = PaddedRows(model.vocab_size, model.padded_vocab_size)
        return MapEntry(key, (model.padded_vocab_size, model.hidden_size), (part,), packing)

    def _norm(self, ours: str, theirs: str, width: int) -> list[MapEntry]:
        kinds = ["weight"] + ["bias"] * (self._model.normalization == "LayerNorm")
        return [plain(ours + kind, theirs + kind, (width,)) for kind in kinds]

    def _attention(self, ours: str, theirs: str) -> Iterator[MapEntry]:
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
                HfTensor(f"{theirs}self_attn.{name}_proj.{kind}", (rows, *rest))
                for name, rows in zip("qkv", packing.rows, strict=True)
            )
            key = f"{ours}linear_qkv.{kind}"
            yield MapEntry(key, (queries + 2 * keys, *rest), parts, packing)
        if model.qk_layernorm:
            for name in "qk":
                key, other = f"{ours}{name}_layernorm.", f"{theirs}self_attn.{name}_norm."
                yield from self._norm(key, other, channels)
        output = theirs + "self_attn.o_proj."
        yield plain(ours + "linear_proj.weight", output + "weight", (width, queries))
        if model.add_bias_linear:
            yield plain(ours + "linear_proj.bias", output + "bias", (width,))

    def _dense(self, ours: str, theirs: str) -> Iterator[MapEntry]:
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
            parts = tuple(HfTensor(f"{theirs}mlp.{name}.{kind}", (hidden, *rest)) for name in first)
            yield MapEntry(f"{ours}linear_fc1.{kind}", (len(first) * hidden, *rest), parts, packing)
        yield plain(ours + "linear_fc2.weight", theirs + "mlp.down_proj.weight", (width, hidden))
        if model.add_bias_linear:
            yield plain(ours + "linear_fc2.bias", theirs + "mlp.down_proj.bias", (width,))

    def _sparse(self, ours: str, theirs: str) -> Iterator[MapEntry]:
        model, names = self._model, self._names
        width, hidden, count = model.hidden_size, model.moe_ffn_hidden_size, model.num_experts
        norm = theirs + "post_attention_layernorm."
        yield from self._norm(ours + "pre_mlp_layernorm.", norm, width)
        router = f"{theirs}mlp.{names.router}"
        yield plain(ours + "mlp.router.weight", router, (count, width))
        unit = names.gated if model.gated_linear_unit else names.ungated
        assert unit, "a layout without such units was chosen for a model that has them"
        yield from expert_entries(
            ours + "mlp.experts.experts.",
            unit,
            [f"{theirs}mlp.{names.expert.format(expert)}" for expert in range(count)],
            width=width,
            hidden=hidden,
        )

    def _inert(self, theirs: str) -> list[HfTensor]:
        if not self._names.shared_expert:
            return []
        width = self._model.hidden_size
        shapes = {"gate_proj": (0, width), "up_proj": (0, width), "down_proj": (width, 0)}
        parts = [
            HfTensor(f"{theirs}shared_expert.{name}.weight", shape)
            for name, shape in shapes.items()
        ]
        return [*parts, HfTensor(theirs + "shared_expert_gate.weight", (1, width))]
