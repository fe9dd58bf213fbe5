"""Every key of the configuration classes of ``transformers`` has an effect, or a reason for none.

The keys come from the classes themselves: one that a newer version adds fails here.
"""

import pytest
from support import hf_models

from megatron_switch.checkpoint.convert.architectures import describe_import
from megatron_switch.checkpoint.convert.config_keys import WITHOUT_EFFECT
from megatron_switch.errors import CheckpointError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "switch_transformers", "t5")
KEYS = [str(number) for number in range(1000)]  # as many tensors as any model here needs
OTHER_WORDS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
    "layer_types": ["sliding_attention"],
    "mlp_only_layers": [1],
}


def config_of(family):
    return hf_models.config(family).to_dict()


def described(config):
    model = describe_import(config, "config.json", KEYS, multiple=1)
    return model.flags, model.name_map.entries, model.notes


def changed(key, value):
    """Return other values of a key; any that has an effect is enough."""
    if key in OTHER_WORDS:
        return [OTHER_WORDS[key]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value + 0.5]
    return ["another"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_changes_the_model_or_is_refused_or_has_a_reason(family):
    config = config_of(family)
    before = described(config)
    assert before[2] == (), "the class has no key that is unknown"
    silent = []
    for key, value in config.items():
        if key in WITHOUT_EFFECT:
            continue
        # Of an untied T5 it is the scale that counts, where both keys are there.
        fallback = {"scale_decoder_outputs": None} if key == "tie_word_embeddings" else {}
        for other in changed(key, value):
            try:
                if described({**config, **fallback, key: other}) != before:
                    break
            except CheckpointError:
                break
        else:
            silent.append(key)
    assert silent == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_unknown_is_named(family):
    notes = described({**config_of(family), "layer_scale": 0.5})[2]
    assert notes == (
        "The configuration has settings that no conversion knows, and training will not have "
        "them: layer_scale 0.5.",
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_that_of_the_source(family):
    key = "dropout_rate" if family in ("t5", "switch_transformers") else "attention_dropout"
    config = {**config_of(family), key: 0.25}
    flags, *_ = described(config)
    assert flags["attention-dropout"] == 0.25
    assert flags["hidden-dropout"] == (0.25 if key == "dropout_rate" else 0.0)
    if "num-experts" in flags:
        assert flags["switch-expert-dropout"] == flags["hidden-dropout"]


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "switch_transformers"])
def test_coefficients_of_losses_are_those_of_the_source(family):
    flags, *_ = described({**config_of(family), "router_aux_loss_coef": 0.125})
    assert flags["moe-aux-loss-coeff"] == 0.125


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "num_hidden_layers"),
        ("qwen3_moe", "num_local_experts"),
        ("qwen2_moe", "num_experts"),
        ("switch_transformers", "num_experts"),
        ("t5", "num_layers"),
        ("t5", "num_decoder_layers"),
    ],
)
def test_a_number_of_parts_that_no_tensor_holds_is_answered_at_once(family, key):
    with pytest.raises(CheckpointError, match=r"more tensors? than the 1000 there are"):
        described({**config_of(family), key: 10**9})


@pytest.mark.parametrize("family", FAMILIES)
def test_no_value_of_a_key_ends_in_a_traceback(family):
    config = config_of(family)
    for key in (*config, "rope_scaling", "layer_types", "num_experts", "feed_forward_proj"):
        for value in (None, True, 0, -1, 10**30, 0.5, float("nan"), "", "x", [], [[1]], {"a": 1}):
            try:
                described({**config, key: value})
            except CheckpointError:
                continue
