"""Explain what Megatron refuses: its rule, the values that it compared, and the flags to change.

Megatron checks arguments with assertions, of which half have no message and few name a flag. The
source of the check says what was compared: attributes of the arguments, or of a configuration that
is made from them. Their values are those at the check.
"""

import ast
import linecache
from collections.abc import Iterator
from types import FrameType

from megatron_switch.flags.argv import flag_name
from megatron_switch.flags.known_flags import shown_flag
from megatron_switch.flags.train_flags import flag_names

_PLAIN = (bool, int, float, str, list, tuple, type(None))


def explain_refusal(error: BaseException) -> str:
    """Return the rule that an assertion or error of Megatron holds, and the values, as sentences.

    Args:
        error: As it was caught, with its traceback.
    """
    frame, line = _raised_at(error)
    if frame is None:
        return _sentence(str(error) or repr(error))
    checks = list(_checks(frame, line))
    rule = str(error) or (f"{ast.unparse(checks[-1])} must hold" if checks else repr(error))
    values = _values(checks, frame)
    if not values:
        return _sentence(rule)
    return f"{_sentence(rule)} The values are {', '.join(values)}. Change one of them."


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _raised_at(error: BaseException) -> tuple[FrameType | None, int]:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (None, 0) if trace is None else (trace.tb_frame, trace.tb_lineno)


def _checks(frame: FrameType, line: int) -> Iterator[ast.expr]:
    """Yield the conditions that led to a line of a function, the outermost first."""
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        node: ast.AST = ast.parse(source)
    except SyntaxError:  # not a file of Python
        return
    while True:
        inner = next(
            (
                child
                for child in ast.iter_child_nodes(node)
                if getattr(child, "lineno", line + 1) <= line <= (child.end_lineno or 0)  # type: ignore[attr-defined]
            ),
            None,
        )
        if inner is None or isinstance(inner, ast.expr):
            return
        if isinstance(inner, ast.If | ast.Assert):
            yield inner.test
        node = inner


def _values(checks: list[ast.expr], frame: FrameType) -> list[str]:
    """Return the attributes in the conditions, each as its flag and value."""
    found = {}
    for check in checks:
        for node in ast.walk(check):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            owner = frame.f_locals.get(node.value.id)
            value = getattr(owner, node.attr, owner)
            if value is not owner and isinstance(value, _PLAIN):
                found[_named(node.attr)] = value
    return [f"{name} {value}" for name, value in found.items()]


def _named(attribute: str) -> str:
    """Return the flag of an attribute, or the attribute where no flag sets it."""
    known = flag_name(attribute).removeprefix("--") in flag_names()
    shown = shown_flag(attribute)
    return shown if known or shown != flag_name(attribute) else attribute
