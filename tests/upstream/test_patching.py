"""A patch is applied as a whole list or not at all, undone always, and stopped by any surprise."""

import importlib
import sys

import pytest

from megatron_switch.errors import UpstreamError
from megatron_switch.upstream.patching import Patch, applied, source_sha256

SOURCE = """
FACTOR = 2

def double(value, factor=FACTOR):
    return value * factor

class Base:
    def name(self):
        return "base"

class Thing(Base):
    @staticmethod
    def twice(value):
        return double(value)
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A freshly imported module to patch, and one that copied a name of it at import."""
    (tmp_path / "patched_library.py").write_text(SOURCE)
    (tmp_path / "importing_library.py").write_text("from patched_library import double\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("patched_library")
    for name in ("patched_library", "importing_library"):
        sys.modules.pop(name, None)


def halve(value, factor=2):
    return value / factor


def test_replaces_within_the_block_only(library):
    original = library.double
    with applied([Patch("patched_library:double", "a test needs it", halve)]):
        assert library.double is halve
    assert library.double is original


def test_restores_after_an_exception(library):
    original = library.double
    with pytest.raises(KeyError), applied([Patch("patched_library:double", "test", halve)]):
        raise KeyError
    assert library.double is original


def test_wrapper_receives_the_original(library):
    def adding_one(original):
        return lambda value, factor=2: original(value, factor) + 1

    with applied([Patch("patched_library:double", "test", wrapper=adding_one)]):
        assert library.double(3) == 7


def test_plain_values_can_be_replaced(library):
    with applied([Patch("patched_library:FACTOR", "test", 5)]):
        assert library.FACTOR == 5
    assert library.FACTOR == 2


def test_static_methods_stay_static(library):
    stored = vars(library.Thing)["twice"]
    with applied([Patch("patched_library:Thing.twice", "test", staticmethod(halve))]):
        assert library.Thing().twice(4) == 2
    assert vars(library.Thing)["twice"] is stored


def test_an_inherited_name_is_inherited_again_afterwards(library):
    with applied([Patch("patched_library:Thing.name", "test", lambda self: "patched")]):
        assert library.Thing().name() == "patched"
        assert library.Base().name() == "base"
    assert "name" not in vars(library.Thing)
    assert library.Thing().name() == "base"


def test_the_recorded_source_is_accepted_and_a_changed_one_stops_everything(library):
    known = source_sha256("patched_library:double")
    with applied([Patch("patched_library:double", "test", halve, sha256=("0" * 64, known))]):
        assert library.double is halve

    original, factor = library.double, library.FACTOR
    patches = [
        Patch("patched_library:FACTOR", "test", 5),
        Patch("patched_library:double", "doubling is too much", halve, sha256=("0" * 64,)),
    ]
    message = (
        rf"(?s)patched_library:double in patched_library .* sha256 {known}, expected 0{{64}}.*"
        r"doubling is too much.*pip install"
    )
    with pytest.raises(UpstreamError, match=message), applied(patches):
        pytest.fail("the block was entered")
    assert (library.double, library.FACTOR) == (original, factor)


@pytest.mark.parametrize(
    "target",
    ["patched_library:triple", "patched_library:Thing.thrice", "no_such_library:double"],
)
def test_a_missing_target_stops_everything(library, target):
    message = rf"{target} does not exist in .*because we can.*upgrade megatron-switch"
    with (
        pytest.raises(UpstreamError, match=message),
        applied([Patch(target, "because we can", halve)]),
    ):
        pytest.fail("the block was entered")


def test_a_copy_made_at_import_is_a_target_of_its_own(library):
    importing = importlib.import_module("importing_library")
    origin = "patched_library:double"
    patches = [
        Patch(origin, "test", halve),
        Patch("importing_library:double", "test", halve, alias_of=origin),
    ]
    with applied(patches):
        assert importing.double is library.double is halve
    assert importing.double is library.double is not halve


def test_a_copy_that_is_no_longer_one_stops_everything(library, monkeypatch):
    importing = importlib.import_module("importing_library")
    monkeypatch.setattr(importing, "double", lambda value, factor: value)
    patch = Patch("importing_library:double", "test", halve, alias_of="patched_library:double")
    with (
        pytest.raises(UpstreamError, match=r"no longer patched_library:double"),
        applied([patch]),
    ):
        pytest.fail("the block was entered")


def test_copies_made_during_application_are_of_the_original(library):
    """All targets are imported before anything is replaced, or a late import would copy a patch."""
    assert "importing_library" not in sys.modules
    patches = [
        Patch("patched_library:double", "test", halve),
        Patch("importing_library:double", "test", halve, alias_of="patched_library:double"),
    ]
    with applied(patches):
        pass
    assert sys.modules["importing_library"].double is library.double is not halve


def test_an_argument_that_the_replacement_does_not_take_stops_everything(library):
    patch = Patch("patched_library:double", "test", lambda value: value)
    message = r"takes an argument 'factor' that its replacement does not know"
    with pytest.raises(UpstreamError, match=message), applied([patch]):
        pytest.fail("the block was entered")


@pytest.mark.parametrize(
    "replacement",
    [lambda *args, **kwargs: 0, lambda value, **kwargs: 0, lambda value, factor, more=1: 0],
)
def test_replacements_may_take_more_than_the_original(library, replacement):
    with applied([Patch("patched_library:double", "test", replacement)]):
        assert library.double is replacement


def test_megatron_is_never_replaced_unseen():
    with pytest.raises(AssertionError, match="no sha256"):
        Patch("megatron.core.utils:is_te_min_version", "test", halve)


def test_a_target_may_stand_only_once_in_a_list(library):
    patch = Patch("patched_library:double", "test", halve)
    with pytest.raises(AssertionError, match="twice"), applied([patch, patch]):
        pytest.fail("the block was entered")
