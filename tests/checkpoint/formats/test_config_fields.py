"""A value of a configuration is what the format says, or is named with what is expected."""

import pytest

from megatron_switch.checkpoint.formats.config_fields import ConfigFields
from megatron_switch.errors import CheckpointError


def fields(**values) -> ConfigFields:
    return ConfigFields(values, "hf/config.json", "llama")


def test_values_come_as_they_are():
    found = fields(a=3, b=0.5, c=2, d=False, e="relu", f=[1, 3], g={"h": 7}, zero=0, nothing=None)
    assert found.integer("a") == 3
    assert found.integer("zero", least=0) == 0
    assert found.number("b") == 0.5
    assert isinstance(found.number("c"), float)
    assert found.fraction("b", 0.1) == 0.5
    assert found.flag("d", True) is False
    assert found.choice("e", ("relu", "silu")) == "relu"
    assert found.layers("f", 4) == (1, 3)
    assert found.inner("g").integer("h") == 7
    assert found.has("zero")
    assert not found.has("nothing")


def test_null_is_as_good_as_nothing():
    found = fields(a=None)
    for name in ("a", "absent"):
        assert found.integer(name, 4) == 4
        assert found.number(name, 0.5) == 0.5
        assert found.flag(name, True) is True
        assert found.choice(name, ("relu",), "relu") == "relu"
        assert found.layers(name, 3) == ()
        with pytest.raises(CheckpointError, match="x has no b, which a llama model needs"):
            ConfigFields({"b": None}, "x", "llama").integer("b")
        with pytest.raises(CheckpointError, match=r"config.json, a has no factor, which"):
            fields(a={}).inner("a").number("factor")


@pytest.mark.parametrize("value", ["3", "abc", [3], {}, True, 0, -1, 1.5, 3.0, float("nan")])
def test_a_size_is_a_whole_number(value):
    with pytest.raises(CheckpointError) as error:
        fields(hidden_size=value).integer("hidden_size")
    assert f"hf/config.json: hidden_size is {value!r}, but a llama model needs" in str(error.value)
    assert "a whole number, 1 or more. Correct the file" in str(error.value)


@pytest.mark.parametrize("value", ["0.1", [0.1], {}, True, -0.1, float("nan"), float("inf")])
def test_a_number_is_finite_and_not_negative(value):
    for positive, expected in ((False, "a number, 0 or more"), (True, "a number above 0")):
        with pytest.raises(CheckpointError, match=f"a is .*, but a llama model needs {expected}"):
            fields(a=value).number("a", positive=positive)


def test_where_zero_is_too_little_and_one_too_much():
    assert fields(a=0).number("a") == 0
    with pytest.raises(CheckpointError, match=r"a is 0, but .* needs a number above 0"):
        fields(a=0).number("a", positive=True)
    with pytest.raises(CheckpointError, match=r"a is 1.0, but .* from 0 to less than 1"):
        fields(a=1).fraction("a", 0.1)


@pytest.mark.parametrize("value", [0, 1, "true", [], {}])
def test_a_flag_is_true_or_false(value):
    with pytest.raises(CheckpointError, match="needs true or false"):
        fields(a=value).flag("a", False)


@pytest.mark.parametrize("value", ["gelu", 1, ["relu"], {"relu": 1}])
def test_a_word_is_one_of_several(value):
    with pytest.raises(CheckpointError, match="needs one of relu, silu"):
        fields(a=value).choice("a", ("relu", "silu"))


@pytest.mark.parametrize(
    "value", ["01", 1, {"1": 1}, [4], [-1], [1, 1], ["1"], [[1]], [1.0], [True]]
)
def test_layers_are_numbers_of_layers(value):
    with pytest.raises(CheckpointError, match="needs a list of layers from 0 to 3, each once"):
        fields(a=value).layers("a", 4)


def test_an_object_is_one():
    with pytest.raises(CheckpointError, match=r"a is 'text', but .* an object of names and values"):
        fields(a="text").inner("a")


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(CheckpointError) as error:
        fields(a="x" * 10_000).integer("a")
    assert len(str(error.value)) < 300
