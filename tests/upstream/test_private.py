"""Private names of torch and Megatron: all exist, and one module names them."""

import ast
import importlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.training import global_vars
from torch.distributed.tensor import DTensor

import megatron_switch
from megatron_switch.upstream import private

ROOT = Path(megatron_switch.__file__).parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
    if "examples" not in path.parts
}
PATCHES = {"upstream.repairs", "emulation.patches", "emulation.gloo", "rehearsal.patches"}
"""Modules of declared patches and of what they put in the place of a private name."""
STANDARD_LIBRARY = {"_actions", "_option_string_actions", "_exit"}  # of argparse and of os
OPERATORS = (torch.ops.aten, torch.ops.c10d)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names() -> set[str]:
    """Every private name that our own code gives to something."""
    own: set[str] = set()
    for path in FILES.values():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and is_self(node)
            ):
                own.add(node.attr)
    return own


def is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_names_in(path: Path, own: set[str]) -> Iterator[str]:
    """Yield private names of other packages that a file imports or reads from an object.

    What a class reads from ``self`` is either its own or inherited, which is how a subclass is
    meant to use it; operators of torch's registry are no names of Python.
    """
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            module = str(node.module)
            if module.split(".")[0] in ("torch", "megatron"):
                for alias in node.names:
                    if any(map(is_private, [*module.split("."), alias.name])):
                        yield f"{module}:{alias.name}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            is_operator = any(hasattr(namespace, node.attr) for namespace in OPERATORS)
            if not is_self(node) and not is_operator and node.attr not in own | STANDARD_LIBRARY:
                yield ast.unparse(node)


def test_only_one_module_and_patches_name_what_is_private():
    own = own_names()
    found = {name: list(private_names_in(path, own)) for name, path in FILES.items()}
    assert len(found.pop("upstream.private")) > 10
    assert {name: uses for name, uses in found.items() if uses and name not in PATCHES} == {}


def test_the_layer_imports_nothing_private():
    for name, path in FILES.items():
        if name.startswith("moe."):
            assert list(private_names_in(path, own_names())) == [], name


def test_a_private_name_would_be_found(tmp_path):
    file = tmp_path / "uses.py"
    file.write_text(
        "from torch._subclasses.fake_tensor import FakeTensor\n"
        "from torch.distributed.checkpoint.filesystem import _StorageInfo\n"
        "address = storage._cdata\n"
        "torch.ops.aten._local_scalar_dense(self._mine)\n"
    )
    assert list(private_names_in(file, set())) == [
        "torch._subclasses.fake_tensor:FakeTensor",
        "torch.distributed.checkpoint.filesystem:_StorageInfo",
        "storage._cdata",
    ]


def names_read_from_modules() -> Iterator[tuple[str, str]]:
    """Yield module and attribute of each private name that private.py reads from a module."""
    parsed = tree(FILES["upstream.private"])
    modules = {"torch": "torch", "torch.overrides": "torch.overrides", "torch._C": "torch._C"}
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megatron."):
            for alias in node.names:
                modules[alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = modules.get(ast.unparse(node.value))
            if owner is not None:
                yield owner, node.attr


def test_every_name_exists():
    """Those imported at the top exist because the module was imported."""
    names = list(names_read_from_modules())
    assert ("megatron.training.global_vars", "_set_wandb_writer") in names
    for module, name in names:
        assert hasattr(importlib.import_module(module), name), f"{module}:{name}"
    assert all(hasattr(private, name) for name in private.__all__)


def test_tensors_have_values_unless_they_are_fake_or_meta():
    with private.FakeTensorMode():
        fake = torch.zeros(2)
        with private.with_values():
            real = torch.zeros(2)
    assert [private.has_values(each) for each in (real, fake, torch.zeros(2, device="meta"))] == [
        True,
        False,
        False,
    ]


def test_views_share_the_address_of_their_storage():
    tensor = torch.zeros(4)
    addresses = [private.storage_address(private.local_storage(t)) for t in (tensor, tensor[1:])]
    assert addresses[0] == addresses[1]
    other = private.storage_address(private.local_storage(torch.zeros(4)))
    assert other != addresses[0]


def test_a_distributed_tensor_is_its_part():
    assert hasattr(DTensor, "_local_tensor") or "_local_tensor" in DTensor.__annotations__


def test_a_backward_pass_is_seen_from_inside():
    seen = []
    x = torch.zeros(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append(private.in_autograd_node()))
    x.exp().sum().backward()
    assert seen == [True]
    assert not private.in_autograd_node()


def test_an_operator_has_a_schema_and_a_packet():
    operator = torch.ops.aten.add.Tensor
    assert private.operator_packet(operator) is torch.ops.aten.add
    assert [str(each.type) for each in private.operator_schema(operator).returns] == ["Tensor"]


def test_the_writer_slot_keeps_its_writer_unless_one_is_given(monkeypatch):
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", "first")
    assert private.replace_tensorboard_writer(None) == "first"
    assert private.replace_tensorboard_writer("second") == "first"
    assert global_vars.get_tensorboard_writer() == "second"


def test_log_writers_are_opened_by_megatron(monkeypatch):
    opened = []
    for name in ("_set_tensorboard_writer", "_set_wandb_writer", "_set_one_logger"):
        monkeypatch.setattr(global_vars, name, opened.append)
    args = Namespace()
    private.open_log_writers(args)
    assert opened == [args] * 3


def test_megatrons_loop_finds_the_signal_handler(monkeypatch):
    monkeypatch.setattr(global_vars, "_GLOBAL_SIGNAL_HANDLER", None)
    handler = object()
    private.install_signal_handler(handler)
    assert global_vars.get_signal_handler() is handler
