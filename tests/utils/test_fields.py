"""A named value is what is expected, or is refused with its place and what is expected."""

import pytest

from megatron_switch.errors import CheckpointError, ConfigError
from megatron_switch.utils.fields import Fields, Source


def read(tmp_path, text):
    path = tmp_path / "values.json"
    path.write_text(text)
    return Fields.read(path, "values file")


def fields(**values) -> Fields:
    return Fields(values, Source("values.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, r"values\.json is nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", r"holds a number that is none: Exceeds the limit"),
        ('{"a": 1, "b": 2, "a": 3}', r"names a key twice: 'a', lines 1\. Remove one"),
        ("[1]", r"must hold an object"),
        ('{"a": }', r"is not JSON: line 1, column 7"),
    ],
)
def test_a_file_without_an_object_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"The values file .*absent\.json cannot be read"):
        Fields.read(tmp_path / "absent.json", "values file")


def test_a_wrong_value_is_named_with_file_line_and_key(tmp_path):
    file = read(tmp_path, '{\n"a": 1,\n"b": {\n"a": "x"}}')
    with pytest.raises(ConfigError, match=r"values\.json, line 4, key 'b\.a': expected a whole"):
        file.inner("b").integer("a")
    with pytest.raises(ConfigError, match=r"values\.json lacks the key 'c' in 'b', a text\."):
        file.inner("b").text("c")


def test_values_come_as_they_are():
    found = fields(a=3, b=0.5, c=2, d=False, e="relu", f=[1, 3], g={"h": 7}, i=["x"], j=[{"k": 1}])
    assert found.integer("a") == 3
    assert found.number("b", least=0, below=1) == 0.5
    assert isinstance(found.number("c"), float)
    assert found.flag("d", True) is False
    assert found.text("e") == found.choice("e", ("relu", "silu")) == "relu"
    assert found.indices("f", 4) == (1, 3)
    assert found.inner("g").integer("h") == 7
    assert found.texts("i") == ["x"]
    assert found.objects("j")[0].integer("k") == 1
    assert found.divisor("a", 1, of=6, what="heads") == 3


def test_an_absent_value_is_its_default_which_may_be_none():
    found = fields()
    assert found.integer("a", 4) == 4
    assert found.integer("a", None) is None
    assert found.number("a", 0.5) == 0.5
    assert found.flag("a", True) is True
    assert found.text("a", "x") == "x"
    assert found.choice("a", ("relu",), "relu") == "relu"
    assert found.indices("a", 3) == ()
    assert found.inner("a").values == {}
    assert not found.has("a")


def test_null_is_no_value_where_the_source_says_so():
    with pytest.raises(ConfigError, match=r"key 'a': expected a whole number, 1 or more"):
        fields(a=None).integer("a", 4)
    lenient = Fields({"a": None}, Source("values.json", null_is_absent=True))
    assert lenient.integer("a", 4) == 4
    assert not lenient.has("a")


def test_a_source_decides_error_and_advice():
    source = Source("config.json", error=CheckpointError, advice="Correct the file.")
    with pytest.raises(CheckpointError, match=r"'a': expected a text, found 1\. Correct the"):
        Fields({"a": 1}, source).text("a")
    with pytest.raises(CheckpointError, match=r"lacks the key 'b', a text\. Correct the file\."):
        Fields({}, source).text("b")


@pytest.mark.parametrize("value", ["3", "abc", [3], {}, True, 0, -1, 1.5, 3.0, float("nan"), None])
def test_a_size_is_a_whole_number(value):
    with pytest.raises(ConfigError, match=r"key 'a': expected a whole number, 1 or more, found"):
        fields(a=value).integer("a")


@pytest.mark.parametrize("value", ["0.1", [0.1], {}, True, -0.1, float("nan"), float("inf")])
def test_a_number_is_finite_and_within_its_bounds(value):
    with pytest.raises(ConfigError, match=r"expected a finite number, 0 or more, found"):
        fields(a=value).number("a", least=0)


def test_bounds_other_than_the_least_are_not_allowed_themselves():
    assert fields(a=0).number("a", least=0) == 0
    with pytest.raises(ConfigError, match=r"expected a finite number, above 0, found 0"):
        fields(a=0).number("a", above=0)
    with pytest.raises(ConfigError, match=r"expected a finite number, 0 or more, below 1, found 1"):
        fields(a=1).number("a", least=0, below=1)


@pytest.mark.parametrize("value", [0, 1, "true", [], {}])
def test_a_flag_is_true_or_false(value):
    with pytest.raises(ConfigError, match="expected true or false"):
        fields(a=value).flag("a", False)


@pytest.mark.parametrize("value", ["gelu", 1, ["relu"], {"relu": 1}])
def test_a_choice_is_one_of_several_words(value):
    with pytest.raises(ConfigError, match="expected one of relu, silu"):
        fields(a=value).choice("a", ("relu", "silu"))


@pytest.mark.parametrize("value", [0, 5, -2, "2"])
def test_a_divisor_divides(value):
    with pytest.raises(ConfigError, match="expected a divisor of its 6 heads"):
        fields(a=value).divisor("a", 1, of=6, what="heads")


@pytest.mark.parametrize(
    "value", ["01", 1, {"1": 1}, [4], [-1], [1, 1], ["1"], [[1]], [1.0], [True]]
)
def test_indices_are_whole_numbers_below_the_count(value):
    with pytest.raises(ConfigError, match="list of whole numbers from 0 to 3, each once"):
        fields(a=value).indices("a", 4)


@pytest.mark.parametrize(
    ("reader", "value", "message"),
    [
        ("inner", "text", "expected an object"),
        ("objects", [{}, 7], "expected a list of objects"),
        ("texts", ["a", 7], "expected a list of texts"),
        ("text", 7, "expected a text"),
    ],
)
def test_other_kinds_are_refused(reader, value, message):
    with pytest.raises(ConfigError, match=message):
        getattr(fields(a=value), reader)("a")


def test_an_unknown_key_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"key 'lengths': there is no such key\. Did you mean"):
        fields(lengths=1).only(["length", "width"])
    with pytest.raises(ConfigError, match=r"no such key\. Known are length, width\."):
        fields(x=1).only(["width", "length"])


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ConfigError) as error:
        fields(a="x" * 10_000).integer("a")
    assert len(str(error.value)) < 300
