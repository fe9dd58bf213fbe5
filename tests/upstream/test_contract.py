"""What this package takes from Megatron-Core is what the installed release offers.

Names, calls and overrides are read from our own source, so the contract cannot fall behind it.
Transformer Engine's classes exist only where it is installed; their signatures are read from
Megatron's source instead, so that a machine without a GPU checks the path that needs one.
"""

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import megatron_switch
from megatron_switch.errors import UpstreamError
from megatron_switch.upstream import version

ROOT = Path(megatron_switch.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if "examples" not in path.parts)

TE_SIGNATURES = {
    "TEColumnParallelGroupedLinear": "num_gemms input_size output_size config init_method bias "
    "skip_bias_add is_expert pg_collection",
    "TERowParallelGroupedLinear": "num_gemms input_size output_size config init_method bias "
    "skip_bias_add is_expert pg_collection",
    "TELayerNormColumnParallelLinear": "input_size output_size config init_method gather_output "
    "bias skip_bias_add is_expert tp_group",
    "TERowParallelLinear": "input_size output_size config init_method bias input_is_parallel "
    "skip_bias_add is_expert tp_group",
    "TEDotProductAttention": "config layer_number attn_mask_type attention_type pg_collection",
}
"""Classes that Megatron's Transformer Engine specs put into our layers, and what it passes."""


@dataclass(frozen=True)
class Import:
    """``from module import name as alias``, or ``import module`` when there is no name."""

    file: Path
    module: str
    name: str | None
    alias: str

    def resolve(self) -> Any:
        module = importlib.import_module(self.module)
        if self.name is None:
            return module
        if not hasattr(module, self.name) and hasattr(module, "__path__"):
            return importlib.import_module(f"{self.module}.{self.name}")
        return getattr(module, self.name)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_in(path: Path) -> Iterator[Import]:
    """What a file imports from Megatron, inside functions too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron":
            for each in node.names:
                yield Import(path, str(node.module), each.name, each.asname or each.name)
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "megatron":
                    yield Import(path, each.name, None, each.asname or each.name)


IMPORTS = [each for path in FILES for each in imports_in(path)]


def missing(taken: list[Import]) -> Iterator[str]:
    for each in taken:
        try:
            each.resolve()
        except (ImportError, AttributeError) as error:
            yield f"{each.file.name}: {each.module}.{each.name} ({error})"


def test_every_imported_name_exists():
    assert len(IMPORTS) > 50
    assert list(missing(IMPORTS)) == []


def test_a_name_that_is_gone_would_be_found():
    gone = Import(Path("ours.py"), "megatron.core.utils", "no_such_function", "x")
    assert list(missing([gone])) != []


def calls_in(path: Path) -> Iterator[tuple[ast.Call, Any]]:
    """Calls that a file makes of names it imported from Megatron, with the callee."""
    known = {each.alias: each.resolve() for each in imports_in(path)}
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id in known:
            yield node, known[function.id]
        elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            owner = known.get(function.value.id)
            if inspect.ismodule(owner) or inspect.isclass(owner):
                yield node, getattr(owner, function.attr)


def misfit(call: ast.Call, callee: Any) -> str | None:
    """Why the arguments of a call do not fit, or None when they do."""
    try:
        signature = inspect.signature(callee)
    except ValueError:  # built in C
        return None
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    positional = () if starred else tuple(call.args)
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    complete = not starred and all(keyword.arg is not None for keyword in call.keywords)
    try:
        (signature.bind if complete else signature.bind_partial)(*positional, **keywords)
    except TypeError as error:
        return f"{callee.__qualname__}{signature}: {error}"
    return None


def test_every_call_fits_the_signature():
    calls = [(path, call, callee) for path in FILES for call, callee in calls_in(path)]
    assert len(calls) > 50
    misfits = {
        f"{path.relative_to(ROOT)}:{call.lineno}": misfit(call, callee)
        for path, call, callee in calls
    }
    assert {place: why for place, why in misfits.items() if why} == {}


def test_a_call_that_does_not_fit_would_be_found():
    def function(first, *, second):
        raise AssertionError("never called")

    for source, fits in {
        "f(1, second=2)": True,
        "f(1)": False,
        "f(1, third=3, second=2)": False,
        "f(*a, second=2)": True,
        "f(*a, third=3)": False,
        "f(**a)": True,
    }.items():
        call = ast.parse(source, mode="eval").body
        assert isinstance(call, ast.Call)
        assert (misfit(call, function) is None) is fits, source


def subclasses() -> Iterator[tuple[type, type]]:
    """Our classes that extend one of Megatron's, with that one."""
    for path in FILES:
        if "__main__" in path.name:
            continue
        relative = path.relative_to(ROOT.parent).with_suffix("")
        module = importlib.import_module(".".join(relative.parts).removesuffix(".__init__"))
        for _, ours in inspect.getmembers(module, inspect.isclass):
            if ours.__module__ == module.__name__:
                for base in ours.__mro__[1:]:
                    if base.__module__.startswith("megatron."):
                        yield ours, base
                        break


def overrides() -> Iterator[tuple[str, inspect.Signature, inspect.Signature]]:
    for ours, base in subclasses():
        for name, function in vars(ours).items():
            inherited = getattr(base, name, None)
            if name == "__init__":  # only we construct our classes
                continue
            if inspect.isfunction(function) and inspect.isfunction(inherited):
                yield (
                    f"{ours.__name__}.{name}",
                    inspect.signature(function),
                    inspect.signature(inherited),
                )


def test_every_override_takes_what_megatron_passes():
    found = list(overrides())
    assert {"SwitchMLP.forward", "SwitchMetricsTracker.report"} <= {name for name, *_ in found}
    for name, ours, theirs in found:
        kinds = {parameter.kind for parameter in ours.parameters.values()}
        required = [p for p in theirs.parameters.values() if p.default is p.empty]
        optional = {p.name for p in theirs.parameters.values() if p.default is not p.empty}
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            assert len(required) <= len(ours.parameters), name
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            assert optional <= ours.parameters.keys(), name


@cache
def te_classes() -> dict[str, ast.ClassDef]:
    spec = importlib.util.find_spec("megatron.core.extensions.transformer_engine")
    assert spec is not None
    assert spec.origin is not None
    nodes = ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("name", TE_SIGNATURES)
def test_transformer_engine_classes_take_what_megatron_passes(name):
    (init,) = [
        each
        for each in te_classes()[name].body
        if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    ]
    taken = {each.arg for each in [*init.args.args, *init.args.kwonlyargs]}
    assert set(TE_SIGNATURES[name].split()) <= taken


def test_the_spec_of_grouped_experts_names_transformer_engines_layers(monkeypatch):
    """The part of Megatron's provider that experts take, as it is with Transformer Engine."""
    from megatron.core.extensions import transformer_engine_spec_provider as provider
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    column, row = type("Column", (), {}), type("Row", (), {})
    monkeypatch.setattr(provider, "TEColumnParallelGroupedLinear", column)
    monkeypatch.setattr(provider, "TERowParallelGroupedLinear", row)
    built = provider.TESpecProvider().grouped_mlp_modules(True)
    assert built.func is TEGroupedMLP
    assert built.keywords["submodules"].linear_fc1 is column
    assert built.keywords["submodules"].linear_fc2 is row


def test_grouped_experts_name_their_weights_by_local_expert():
    """``weight0``, ``weight1``, ... of Transformer Engine's layers, as Megatron reads them."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    assert 'linear.get_parameter(f"weight{idx}")' in inspect.getsource(TEGroupedMLP)


def test_the_installed_version_is_the_supported_one():
    version.check_version()


@pytest.mark.parametrize("local", ["0.19.2", "0.19.2+cluster.3"])
def test_a_local_build_of_the_release_is_accepted(monkeypatch, local):
    monkeypatch.setattr(version, "version", lambda name: local)
    version.check_version()


@pytest.mark.parametrize("other", ["0.19.1", "0.20.0", "0.19.20", "0.19.2rc1"])
def test_another_version_is_refused(monkeypatch, other):
    monkeypatch.setattr(version, "version", lambda name: other)
    message = rf"checked against megatron-core 0\.19\.2, but {other} is installed.*pip install"
    with pytest.raises(UpstreamError, match=message):
        version.check_version()


def test_no_version_is_refused(monkeypatch):
    def none(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", none)
    with pytest.raises(UpstreamError, match=r"but no version is installed.*pip install"):
        version.check_version()
