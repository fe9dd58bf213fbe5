"""The architectures that can be converted: which description and which name map each one has.

A ``config.json`` or Megatron's stored arguments go in; a description, a name map, the other
side's settings and what the user should know come out. What the description cannot say is refused
by name, because a setting that is ignored silently makes another model; what is not
listed here is refused with the list.
"""

from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_switch.architecture.model import ROUTING, Architecture
from megatron_switch.checkpoint.convert.config_keys import unknown_settings
from megatron_switch.checkpoint.convert.gpt_config import read_gpt_config, write_gpt_config
from megatron_switch.checkpoint.convert.gpt_names import SWITCH_EXPERTS, gpt_name_map
from megatron_switch.checkpoint.convert.gpt_types import GPT_TYPES, choose_type
from megatron_switch.checkpoint.convert.name_map import NameMap
from megatron_switch.checkpoint.convert.t5_config import (
    DENSE,
    SWITCH,
    T5_TYPES,
    read_t5_config,
    sequence_capacity,
    write_t5_config,
)
from megatron_switch.checkpoint.convert.t5_names import t5_name_map
from megatron_switch.checkpoint.formats.hf_folder import config_fields
from megatron_switch.config import switch_traits
from megatron_switch.errors import CheckpointError
from megatron_switch.flags.argv import flag_name
from megatron_switch.flags.recipes import RECIPES
from megatron_switch.utils.fields import Fields

_SAID_BY_NO_FIELD: Mapping[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (None,),
    "apply_residual_connection_post_layernorm": (False, None),
    "attention_output_gate": (False, None),
    "experimental_attention_variant": (None,),
    "glu_linear_offset": (0.0, None),
    "heterogeneous_layers_config_path": (None,),
    "layernorm_zero_centered_gamma": (False, None),
    "moe_latent_size": (None,),
    "moe_router_enable_expert_bias": (False, None),
    "moe_router_num_groups": (None,),
    "moe_router_pre_softmax": (True, None),
    "moe_router_score_function": ("softmax", None),
    "moe_router_topk": (1, None),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_shared_expert_intermediate_size": (None, 0),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False, None),
    "no_rope_freq": (None,),
    "qk_l2_norm": (False, None),
    "rope_type": (None, "rope"),
    "rotary_interleaved": (False, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "softmax_type": ("vanilla", None),
    "use_mup": (False, None),
    "window_size": (None,),
}
"""Attributes of Megatron's namespace that change a GPT, and the values with which they do not."""


@dataclass(frozen=True)
class ImportedModel:
    """A model in Hugging Face's format, described for Megatron."""

    model_type: str
    architecture: Architecture
    name_map: NameMap
    notes: tuple[str, ...] = ()
    """What the user should know."""

    @property
    def flags(self) -> dict[str, Any]:
        """Flags of Megatron, without dashes, that describe the model; True stands alone."""
        return self.architecture.to_flags()

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding there."""
        return self.architecture.vocab_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding in Megatron."""
        return self.architecture.padded_vocab_size


@dataclass(frozen=True)
class ExportedModel:
    """A model of Megatron, described in Hugging Face's format."""

    model_type: str
    name_map: NameMap
    config: Callable[[str], dict[str, Any]]
    """Content of ``config.json``, given the name of the weights' type."""
    vocab_size: int
    notes: tuple[str, ...]
    """What the user should know."""


def describe_import(
    config: Mapping[str, Any], where: str, keys: Collection[str], *, multiple: int
) -> ImportedModel:
    """Describe a model from its ``config.json``.

    Args:
        config: Content of the file.
        where: The file, for messages.
        keys: Names of the tensors that come with it.
        multiple: Rows of the embedding become a multiple of this.

    Raises:
        CheckpointError: No name map fits the architecture.
    """
    found = config.get("model_type")
    if found not in model_types():
        raise CheckpointError(
            f"{where} is of a model of type {found!r:.60}, for which there is no name map. "
            f"Converted are: {', '.join(model_types())}."
        )
    model_type = str(found)
    fields = config_fields(config, where, model_type)
    _refuse_more_parts_than_tensors(fields, keys)
    if model_type in GPT_TYPES:
        model = read_gpt_config(fields, multiple=multiple)
        _refuse_more_experts_than_tensors(fields, model, keys)
        name_map = gpt_name_map(model, GPT_TYPES[model_type].experts or SWITCH_EXPERTS)
    else:
        model, head = read_t5_config(fields, keys, multiple=multiple)
        _refuse_more_experts_than_tensors(fields, model, keys)
        name_map = t5_name_map(model, switch=model_type == SWITCH, head=head)
    return ImportedModel(model_type, model, name_map, unknown_settings(fields))


def _refuse_more_parts_than_tensors(fields: Fields, keys: Collection[str]) -> None:
    """Refuse, before any list is made, a number of layers that would need more tensors."""
    for name in ("num_hidden_layers", "num_layers", "num_decoder_layers"):
        if fields.integer(name, 0, least=0) > len(keys):
            raise fields.error(
                name,
                f"{fields.values[name]} layers need more tensors than the {len(keys)} there are. "
                "Take the configuration that belongs to the weights.",
            )


def _refuse_more_experts_than_tensors(
    fields: Fields, model: Architecture, keys: Collection[str]
) -> None:
    experts = model.num_experts * len(model.sparse_layer_numbers)
    if experts > len(keys):
        raise fields.error(
            "num_experts",
            f"{model.num_experts} experts in {len(model.sparse_layer_numbers)} layers need more "
            f"tensors than the {len(keys)} there are. Take the configuration that belongs to the "
            "weights.",
        )


def describe_export(args: Namespace, *, wanted: str, vocab_size: int | None) -> ExportedModel:
    """Describe a model from the arguments stored in its checkpoint.

    Args:
        args: Megatron's namespace.
        wanted: Model type to write, or ``auto``.
        vocab_size: Rows of the embedding to write; None for all.

    Raises:
        CheckpointError: The architecture cannot compute the model.
    """
    model = model_of_checkpoint(args, vocab_size=vocab_size)
    if model.encoder is not None:
        return _describe_t5(args, model, wanted)
    if wanted in T5_TYPES:
        raise CheckpointError(
            f"--architecture {wanted} is an encoder-decoder, but the checkpoint's model is a "
            f"decoder-only one. Use auto, or one of {', '.join(GPT_TYPES)}."
        )
    chosen, notes = choose_type(model, wanted)
    return ExportedModel(
        chosen.name,
        gpt_name_map(model, chosen.experts or SWITCH_EXPERTS),
        lambda dtype: write_gpt_config(model, chosen, dtype),
        model.vocab_size,
        notes,
    )


def _describe_t5(args: Namespace, model: Architecture, wanted: str) -> ExportedModel:
    model_type = SWITCH if model.num_experts else DENSE
    if wanted not in ("auto", model_type):
        raise CheckpointError(
            f"--architecture {wanted} cannot hold the checkpoint's model, which is of type "
            f"{model_type}. Use auto."
        )
    capacity, notes = sequence_capacity(args) if model.num_experts else (None, ())
    write_t5_config(model, capacity, "float32")  # refuses what the format cannot say
    if model.gated_linear_unit and model_type == SWITCH:
        notes += (
            "transformers has no Switch with gated units: no stock class opens this folder. Its "
            "names are those of the released Switch-XXL.",
        )
    rates = {model.hidden_dropout, model.attention_dropout}
    if len(rates | ({model.switch_expert_dropout} if model.num_experts else set())) > 1:
        notes += (
            f"Hugging Face's T5 has one dropout rate: the export has --hidden-dropout "
            f"{model.hidden_dropout} for --attention-dropout {model.attention_dropout} and "
            f"--switch-expert-dropout {model.switch_expert_dropout} too.",
        )
    return ExportedModel(
        model_type,
        t5_name_map(model, switch=model_type == SWITCH),
        lambda dtype: write_t5_config(model, capacity, dtype),
        model.vocab_size,
        notes,
    )


def model_of_checkpoint(args: Namespace, *, vocab_size: int | None = None) -> Architecture:
    """Return the model that a checkpoint's stored arguments describe.

    Args:
        args: Megatron's namespace, as a run stores it.
        vocab_size: Rows of the embedding outside of Megatron; by default all of Megatron's.

    Raises:
        CheckpointError: A GPT has parts that no field of the description says.
    """
    model = Architecture.from_args(args, vocab_size=vocab_size)
    if model.encoder is not None:
        return model
    wrong = {
        name: getattr(args, name)
        for name, neutral in _SAID_BY_NO_FIELD.items()
        if getattr(args, name, neutral[0]) not in neutral
        and (model.num_experts or not name.startswith("moe_"))
    }
    if model.position_embedding_type not in ("rope", "learned_absolute", "none"):
        wrong["position_embedding_type"] = args.position_embedding_type
    if wrong:
        found = ", ".join(f"{flag_name(name)} {value}" for name, value in wrong.items())
        raise CheckpointError(
            f"The checkpoint's model has parts that no conversion knows: {found}. Only models "
            "without them can be converted."
        )
    return replace(model, routing=_routing_of(args)) if model.num_experts else model


def _routing_of(args: Namespace) -> dict[str, Any]:
    """Return what decides which tokens an expert computes, where nothing is left to a default.

    Stock Megatron stores a capacity factor alone, or None, with which it drops no token.
    """
    routing = {name: getattr(args, name) for name in ROUTING if hasattr(args, name)}
    factor = routing.get("moe_expert_capacity_factor")
    routing["moe_expert_capacity_factor"] = -1.0 if factor is None else factor
    if any(name in switch_traits() for name in routing):
        return routing
    stock = {name: RECIPES["megatron"][name] for name in ROUTING if name in RECIPES["megatron"]}
    stock["switch_eval_capacity_factor"] = routing["moe_expert_capacity_factor"]
    if getattr(args, "moe_token_drop_policy", None) == "position":
        stock["switch_drop_order"] = "first_come"
    return stock | routing


def name_map_of(model: Architecture) -> NameMap:
    """Return the name map of a model in whichever format holds it, for Megatron's side of it."""
    return gpt_name_map(model) if model.encoder is None else t5_name_map(model, switch=True)


def model_types() -> tuple[str, ...]:
    """Return every model type that can be read and written."""
    return (*GPT_TYPES, *T5_TYPES)
