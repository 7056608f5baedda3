"""Whether a version of a package has what our code uses of it, in the form that we use."""

from __future__ import annotations

import ast
import inspect
import warnings
from pathlib import Path
from typing import Any

from tests.cuda.upstream import Definition, Source, signature_of
from tests.cuda.uses import Arguments, Use

_UNKNOWN = object()


def problem(use: Use, source: Source) -> str | None:
    """What is wrong, in words; None if the use fits, or cannot be judged from the source."""
    found = source.resolve(use.path)
    if use.kind == "override":
        # A name that the base has not is ours alone, and what makes an object is not called as
        # the base's is.
        if use.path.endswith(("__init__", "__new__")):
            return None
        return _check(use, found, source) if found is not None else None
    if found is None:
        return "does not exist"
    return _check(use, found, source)


def _check(use: Use, found: Definition, source: Source) -> str | None:
    if use.kind == "call":
        signature = source.signature(found, bound=use.bound)
        return None if signature is None else _binds(signature, use.how)
    if use.kind in ("override", "replace"):
        return _takes_its_place(use, found, source)
    if use.kind == "parameters" and found.kind == "function":
        names = tuple(signature_of(found.node.args).parameters)
        return None if names == use.how else f"takes {names}, not {use.how}"
    if use.kind == "subclass" and found.kind == "class":
        missing = source.abstract_methods(found) - set(use.how)
        return f"is abstract in {sorted(missing)}" if missing else None
    if use.kind == "generic" and found.kind == "class":
        count = source.type_parameters(found)
        return None if count == use.how else f"has {count} type parameters, and we give {use.how}"
    return None


def _binds(signature: inspect.Signature, how: Arguments) -> str | None:
    positional = [_UNKNOWN] * how.positional
    keywords = dict.fromkeys(how.keywords, _UNKNOWN)
    try:
        # What is unpacked into a call may be what is missing from it.
        (signature.bind_partial if how.is_partial else signature.bind)(*positional, **keywords)
    except TypeError as error:
        return f"cannot be called so: {error}"
    return None


def _takes_its_place(use: Use, found: Definition, source: Source) -> str | None:
    """Ours must take every call that the other one takes."""
    if found.kind != "function" or found.is_property != _is_property(use.how):
        kinds = found.kind == "function" and "one is a property"
        return f"cannot be replaced by a function: {kinds}" if kinds else None
    ours, theirs = signature_of(use.how.args), signature_of(found.node.args)
    p = inspect.Parameter
    positional = [
        each for each in theirs.parameters.values() if each.kind <= p.POSITIONAL_OR_KEYWORD
    ]
    only = [each.name for each in theirs.parameters.values() if each.kind == p.KEYWORD_ONLY]
    needed = [each for each in positional if each.default is p.empty]
    needed_only = [name for name in only if theirs.parameters[name].default is p.empty]
    first = 1 if found.owner is not None and not found.is_static else 0
    by_name = tuple(each.name for each in positional[first:] if each.kind != p.POSITIONAL_ONLY)
    for call in (
        Arguments(len(positional), tuple(only), False),
        Arguments(len(needed), tuple(needed_only), False),
        Arguments(min(first, len(positional)), (*by_name, *only), False),
    ):
        if said := _binds(ours, call):
            return f"is called in a way that ours does not take: {said}"
    return None


def _is_property(node: Any) -> bool:
    decorators = [ast.unparse(each) for each in node.decorator_list]
    return any(name.endswith("property") for name in decorators)


def defined_names(folder: Path, *, texts: bool = False) -> set[str]:
    """Every name that code in a folder binds: functions, classes, attributes, arguments, fields.

    With `texts` all strings, too: attributes are set by flags and keys.
    """
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        with warnings.catch_warnings(action="ignore"):  # of escapes in strings
            tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif texts and isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found
