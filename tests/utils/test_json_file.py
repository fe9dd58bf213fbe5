"""Files that users write: what is no object of finite numbers is told with its place."""

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.utils.json_file import JsonFile


def read(tmp_path, text):
    path = tmp_path / "values.json"
    path.write_text(text)
    return JsonFile.read(path, "values file")


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
def test_what_is_no_object_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400"])
def test_numbers_are_finite(tmp_path, number):
    file = read(tmp_path, f'{{\n"a": {number}}}')
    with pytest.raises(ConfigError, match=r"line 2, key 'a': must be a finite number"):
        file.get("a", float)
