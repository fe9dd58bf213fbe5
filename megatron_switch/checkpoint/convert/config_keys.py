"""Keys of a ``config.json`` that are not read: why training does not depend on them.

Every other key is either read, and then is one of the model's flags or refused, or named to the
user. A test holds the configuration classes of ``transformers`` against this.
"""

from collections.abc import Mapping

from megatron_switch.checkpoint.formats.source_settings import TOKEN_IDS
from megatron_switch.utils.fields import Fields

_REASONS: Mapping[str, str] = {
    "_name_or_path transformers_version unsloth_version tokenizer_class finetuning_task": (
        "where the folder comes from"
    ),
    "model_type architectures is_encoder_decoder is_decoder add_cross_attention auto_map": (
        "model_type alone selects the name map, and no code of others is run"
    ),
    "dtype torch_dtype use_bfloat16": "the files of the weights have their own types",
    "initializer_range initializer_factor": "every weight is loaded, and none is drawn",
    "use_cache return_dict return_dict_in_generate output_hidden_states output_attentions "
    "output_scores output_past torchscript tf_legacy_loss": "what transformers returns",
    "output_router_logits": "the balancing loss is computed in any case, with its coefficient",
    "chunk_size_feed_forward gradient_checkpointing": "the same numbers, with less memory",
    "id2label label2id num_labels problem_type classifier_dropout": (
        "heads that classify; their tensors would be refused"
    ),
    "sliding_window max_window_layers": "a model with use_sliding_window is refused",
    "n_positions": "no tensor of a T5 depends on a number of positions",
    "router_ignore_padding_tokens add_router_probs": "transformers does not read it either",
    " ".join(TOKEN_IDS): "kept beside the tokenizer, and written back by an export",
}

WITHOUT_EFFECT: Mapping[str, str] = {
    key: reason for keys, reason in _REASONS.items() for key in keys.split()
}
"""The reason by key."""


def unknown_settings(fields: Fields) -> tuple[str, ...]:
    """Return a note on the keys that were not read and are not known to be without effect.

    Args:
        fields: A configuration, after all of it was read.
    """
    unknown = {k: value for k, value in fields.unread().items() if k not in WITHOUT_EFFECT}
    if not unknown:
        return ()
    shown = ", ".join(f"{key} {value!r:.40}" for key, value in sorted(unknown.items()))
    return (
        "The configuration has settings that no conversion knows, and training will not have "
        f"them: {shown}.",
    )
