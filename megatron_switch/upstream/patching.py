"""Replace names in installed packages: declared, verified, and undone.

A :class:`Patch` says what it replaces, why, and against which source it was checked.
:func:`applied` verifies *every* patch of a list before it applies the first one, and restores every
name when the block is left, also by an exception. A patch that does not fit what is installed stops
the program with :class:`UpstreamError`; it is never only a warning.

What "fits" means depends on what is replaced:

* Megatron's functions are replaced because of what their body does, so the body is
  checked: ``sha256`` lists the hash of the source in every supported release.
* torch's functions are replaced entirely, and some have no source, so only the
  name and the signature are checked: the replacement must accept every argument that
  the original declares.
* A name that another module bound at import (``from torch.cuda import _lazy_call``)
  is a target of its own: ``alias_of`` names the origin, and both must still be one object.

All targets are imported before anything is replaced, so that modules which copy names
at import copy the originals. Importing this module replaces nothing.
"""

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megatron_switch.errors import UpstreamError

_DISTRIBUTIONS = {"megatron": "megatron-core"}


@dataclass(frozen=True)
class Patch:
    """One name to replace.

    Attributes:
        target: ``"package.module:attribute"`` or ``"package.module:Class.attribute"``.
        reason: Why the original does not work here, as the end of a sentence; shown to users.
        replacement: The object put in place of the original, unless ``wrapper`` is given.
        wrapper: Called with the original as it is stored (a ``staticmethod`` object stays
            one); returns the object put in its place.
        sha256: Hashes of the original's source, one for each release this was checked
            with. Required for Megatron's functions and classes.
        alias_of: Target whose object the name was bound to at import.
    """

    target: str
    reason: str
    replacement: Any = None
    wrapper: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    sha256: tuple[str, ...] = field(default=(), kw_only=True)
    alias_of: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check what only the author of a patch can cause."""
        package, _, _ = self.target.partition(".")
        assert self.target.count(":") == 1, f"{self.target!r} is not 'module:attribute'"
        assert self.reason, f"{self.target} gives no reason"
        assert package != "megatron" or self.sha256 or self.alias_of, f"{self.target}: no sha256"

    def replace(self, original: Any) -> Any:
        """Return what replaces ``original`` while the patch is applied."""
        return self.replacement if self.wrapper is None else self.wrapper(original)


@contextmanager
def applied(patches: Sequence[Patch]) -> Iterator[None]:
    """Apply ``patches`` in order for the length of a ``with`` block.

    Raises:
        UpstreamError: A target is missing, or is not what its patch was checked against.
            Nothing has been replaced then.
    """
    targets = [patch.target for patch in patches]
    assert len(set(targets)) == len(targets), "a target stands twice in one list of patches"
    planned = [_plan(patch) for patch in patches]
    done: list[_Planned] = []
    try:
        for plan in planned:
            setattr(plan.owner, plan.name, plan.new)
            done.append(plan)
        yield
    finally:
        for plan in reversed(done):
            plan.restore()


def source_sha256(target: str) -> str:
    """Return the hash by which :class:`Patch` recognises the source of ``target``.

    Raises:
        UpstreamError: The target does not exist.
    """
    owner, name = _resolve(target, "checks")
    return _source_sha256(inspect.getattr_static(owner, name))


@dataclass(frozen=True)
class _Planned:
    owner: Any
    name: str
    original: Any
    inherited: bool  # found on a base class: leaving deletes our name instead of setting theirs
    new: Any

    def restore(self) -> None:
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


def _plan(patch: Patch) -> _Planned:
    owner, name = _resolve(patch.target, patch.reason)
    original = inspect.getattr_static(owner, name)
    if patch.sha256:
        _check_source(patch, original)
    if patch.alias_of is not None:
        _check_alias(patch, original)
    new = patch.replace(original)
    _check_signature(patch, original, new)
    return _Planned(owner, name, original, name not in vars(owner), new)


def _resolve(target: str, reason: str) -> tuple[Any, str]:
    """Return the object that holds the target, and the target's name on it."""
    module_name, _, path = target.partition(":")
    *parents, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        raise UpstreamError(
            f"{target} does not exist in {_installed(target)} ({error}), but this program "
            f"replaces it: {reason}. {_way_out(target)}"
        ) from error
    return owner, name


def _check_source(patch: Patch, original: Any) -> None:
    found = _source_sha256(original)
    if found not in patch.sha256:
        raise UpstreamError(
            f"{patch.target} in {_installed(patch.target)} is not the code that its patch was "
            f"checked against: sha256 {found}, expected {' or '.join(patch.sha256)}. "
            f"The patch is there because: {patch.reason}. {_way_out(patch.target)}"
        )


def _check_alias(patch: Patch, original: Any) -> None:
    assert patch.alias_of is not None
    owner, name = _resolve(patch.alias_of, patch.reason)
    if inspect.getattr_static(owner, name) is not original:
        raise UpstreamError(
            f"{patch.target} in {_installed(patch.target)} is no longer {patch.alias_of}, whose "
            f"patched copy it must be: {patch.reason}. {_way_out(patch.target)}"
        )


def _check_signature(patch: Patch, original: Any, new: Any) -> None:
    """Every argument that the original declares must be one that the replacement takes."""
    declared, taken = _signature(original), _signature(new)
    if declared is None or taken is None:
        return
    kinds = [parameter.kind for parameter in taken.parameters.values()]
    any_position = inspect.Parameter.VAR_POSITIONAL in kinds
    any_keyword = inspect.Parameter.VAR_KEYWORD in kinds
    for name, parameter in declared.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # nothing is named, so nothing can be checked
        by_keyword = any_keyword or name in taken.parameters
        if not (by_keyword or (any_position and parameter.kind is not parameter.KEYWORD_ONLY)):
            raise UpstreamError(
                f"{patch.target} in {_installed(patch.target)} takes an argument {name!r} that "
                f"its replacement does not know; signature found: {declared}. "
                f"It is replaced because: {patch.reason}. {_way_out(patch.target)}"
            )


def _signature(value: Any) -> inspect.Signature | None:
    if not callable(value):
        return None
    try:
        return inspect.signature(value)
    except (TypeError, ValueError):  # built in C, without a text signature
        return None


def _source_sha256(value: Any) -> str:
    plain = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    return hashlib.sha256(inspect.getsource(plain).encode()).hexdigest()


def _distribution(target: str) -> str:
    package = target.partition(":")[0].partition(".")[0]
    return _DISTRIBUTIONS.get(package, package)


def _installed(target: str) -> str:
    distribution = _distribution(target)
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return f"{distribution} (not installed as a package)"


def _way_out(target: str) -> str:
    return (
        f"Install the {_distribution(target)} version that this release of megatron-switch asks "
        "for (pip install --force-reinstall megatron-switch), or upgrade megatron-switch."
    )
