"""What packages define, read from their sources: nothing of them is imported.

    source = Source([site_packages])
    source.resolve("vllm.config.VllmConfig.parallel_config")  ->  a Definition, or None

A name counts as defined if any branch of the code defines it: which `try` succeeds depends on the
machine. What comes from other packages is `EXTERNAL` and taken as it is, but for attributes of base
classes that can be imported here (torch, the standard library), which are looked up.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "megatron", "transformer_engine")
_LOOKED_UP = ("torch", "abc", "collections", "enum", "typing", "builtins", "threading", "logging")


@dataclass(frozen=True)
class Definition:
    """Where a name leads to. `kind`: module, class, function, value, external."""

    kind: str
    path: str = ""
    node: Any = None
    module: Module | None = None
    owner: Definition | None = None  # the class that a function is a method of

    @property
    def is_static(self) -> bool:
        return self.kind == "function" and "staticmethod" in _decorators(self.node)

    @property
    def is_property(self) -> bool:
        names = _decorators(self.node) if self.kind == "function" else []
        return any(name.endswith("property") for name in names)


EXTERNAL = Definition("external")


@dataclass(frozen=True, eq=False)
class Module:
    """One file: its names with the nodes that bind them, and the modules that it imports whole."""

    name: str
    is_package: bool
    names: dict[str, list[ast.AST]]
    stars: tuple[str, ...]

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that an import names, relative or not."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + (1 if self.is_package else 0)]
        return ".".join([*parts, *([node.module] if node.module else [])])


class Source:
    """The packages under some folders; of a name in several of them the first folder's."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._modules: dict[str, Module | None] = {}
        self._open: set[tuple[str, str]] = set()

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module | None:
        package, *rest = name.split(".")
        folder = next((f for f in self.folders if (f / package).is_dir()), None)
        if folder is None:
            return None
        path = folder.joinpath(package, *rest)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                names, stars = _names_of(ast.parse(file.read_text(encoding="utf-8")).body)
                module = Module(name, file.name == "__init__.py", names, ())
                return replace(module, stars=tuple(map(module.absolute, stars)))
        return Module(name, True, {}, ()) if path.is_dir() else None

    def resolve(self, path: str) -> Definition | None:
        """What `path` leads to; None if something on the way is not there."""
        parts = path.split(".")
        if parts[0] not in PACKAGES:
            return EXTERNAL
        module = self.module(parts[0])
        found = Definition("module", parts[0], module=module) if module else None
        for part in parts[1:]:
            if found is None or found.kind == "external":
                break
            found = self.member(found, part)
        return found

    def member(self, of: Definition, name: str) -> Definition | None:
        if of.kind == "module":
            assert of.module is not None
            return self._in_module(of.module, name)
        if of.kind == "class":
            return self._in_class(of, name)
        return EXTERNAL  # of values and results nothing is known

    def _in_module(self, module: Module, name: str) -> Definition | None:
        if (module.name, name) in self._open:
            return None  # a circle of imports
        self._open.add((module.name, name))
        try:
            found = [self._bound(module, name, node) for node in module.names.get(name, ())]
            # Of several branches the one that says most: a class before `= None`.
            order = ("class", "function", "module", "external", "value")
            if known := sorted(filter(None, found), key=lambda d: order.index(d.kind)):
                return known[0]
            if self.module(f"{module.name}.{name}") is not None:
                path = f"{module.name}.{name}"
                return Definition("module", path, module=self.module(path))
            for star in module.stars:
                source = self.resolve(star)
                if source and (definition := self.member(source, name)):
                    return definition
            return None
        finally:
            self._open.discard((module.name, name))

    def _bound(self, module: Module, name: str, node: ast.AST) -> Definition | None:
        path = f"{module.name}.{name}"
        if isinstance(node, ast.ClassDef):
            return Definition("class", path, node, module)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return Definition("function", path, node, module)
        if isinstance(node, ast.ImportFrom):
            alias = next(a for a in node.names if (a.asname or a.name) == name)
            return self.resolve(f"{module.absolute(node)}.{alias.name}")
        if isinstance(node, ast.Import):
            alias = next(a for a in node.names if name in (a.asname, a.name.split(".")[0]))
            return self.resolve(alias.name if alias.asname else name)
        value = getattr(node, "value", None)
        if isinstance(value, (ast.Name, ast.Attribute)) and isinstance(node, ast.Assign):
            if found := self.evaluate(module, value):
                return found
        return Definition("value", path, node, module)

    def evaluate(self, module: Module, expression: ast.AST | None) -> Definition | None:
        """What a name with attributes leads to in a module; None of anything else."""
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            with contextlib.suppress(SyntaxError):
                return self.evaluate(module, ast.parse(expression.value, mode="eval").body)
        if isinstance(expression, ast.Subscript):
            return self.evaluate(module, expression.value)
        if isinstance(expression, ast.Attribute):
            of = self.evaluate(module, expression.value)
            return of and (of if of.kind == "external" else self.member(of, expression.attr))
        if isinstance(expression, ast.Name):
            return self._in_module(module, expression.id)
        return None

    # ---------------------------------------------------------------------------------- classes

    def lineage(self, cls: Definition) -> Iterator[Definition | ast.expr]:
        """The class, then its bases in order; a base that is not of these packages as written."""
        yield cls
        for base in cls.node.bases:
            found = self.evaluate(cls.module, base)
            if found is not None and found.kind == "class":
                yield from self.lineage(found)
            else:
                yield base

    def _in_class(self, cls: Definition, name: str) -> Definition | None:
        for each in self.lineage(cls):
            if isinstance(each, Definition):
                members = class_members(each.node)
                if name in members or "__getattr__" in members:
                    node = members.get(name)
                    path = f"{each.path}.{name}"
                    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        return Definition("function", path, node, each.module, each)
                    if isinstance(node, ast.ClassDef):
                        return Definition("class", path, node, each.module)
                    return Definition("value", path, node, each.module, each)
            elif _external_has(ast.unparse(each), name):
                return EXTERNAL
        return None

    def attribute_class(self, cls: Definition, name: str) -> Definition | None:
        """The class that an attribute of an instance is annotated with, or made of."""
        found = self._in_class(cls, name)
        if found is None or found.node is None or found.module is None:
            return None
        node = found.node
        if found.is_property:
            return self.annotated(found.module, node.returns)
        if isinstance(node, ast.AnnAssign):
            return self.annotated(found.module, node.annotation)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = self.evaluate(found.module, node.value.func)
            return made if made and made.kind == "class" else None
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            arguments = getattr(node, "arguments_of_method", {})
            return self.annotated(found.module, arguments.get(node.value.id))
        return None

    def annotated(self, module: Module, annotation: ast.AST | None) -> Definition | None:
        """The class of these packages that an annotation names; `| None` does not count."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            with contextlib.suppress(SyntaxError):
                return self.annotated(module, ast.parse(annotation.value, mode="eval").body)
        if isinstance(annotation, ast.BinOp):
            sides = (annotation.left, annotation.right)
            kept = [side for side in sides if ast.unparse(side) != "None"]
            return self.annotated(module, kept[0]) if len(kept) == 1 else None
        if isinstance(annotation, ast.Subscript):
            if ast.unparse(annotation.value).endswith("Optional"):
                return self.annotated(module, annotation.slice)
            return None
        found = self.evaluate(module, annotation)
        return found if found and found.kind == "class" else None

    def type_parameters(self, cls: Definition) -> int | None:
        """How many the class takes in brackets; None if it is not generic."""
        if parameters := getattr(cls.node, "type_params", ()):
            return len(parameters)
        for base in cls.node.bases:
            if isinstance(base, ast.Subscript) and ast.unparse(base.value).endswith("Generic"):
                inside = base.slice
                return len(inside.elts) if isinstance(inside, ast.Tuple) else 1
        return None

    def abstract_methods(self, cls: Definition) -> set[str]:
        """Those that a subclass has to write."""
        found, written = set(), set()
        for each in self.lineage(cls):
            if isinstance(each, Definition):
                for name, node in class_members(each.node).items():
                    if name not in written and "abstractmethod" in _decorators(node):
                        found.add(name)
                    written.add(name)
        return found

    # ------------------------------------------------------------------------------- signatures

    def signature(self, of: Definition, *, bound: bool = False) -> inspect.Signature | None:
        """Of a function (`bound`: by an instance) or of making one; None if it cannot be told."""
        if of.kind == "class":
            init = self._in_class(of, "__init__")
            if init is not None and init.kind == "function":
                return signature_of(init.node.args, drop_first=True)
            return self._of_fields(of)
        if of.kind != "function" or of.is_property:
            return None
        decorators = _decorators(of.node)
        is_class_method = "classmethod" in decorators
        drop = is_class_method or (bound and of.owner is not None and not of.is_static)
        return signature_of(of.node.args, drop_first=drop)

    def _of_fields(self, cls: Definition) -> inspect.Signature | None:
        """Of a dataclass, or of a class made like one."""
        fields: dict[str, inspect.Parameter] = {}
        lineage = list(self.lineage(cls))
        if not any(_has_fields(each) for each in lineage):
            return None
        for each in reversed(lineage):
            if not isinstance(each, Definition):
                continue
            for node in each.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    if "ClassVar" not in ast.unparse(node.annotation):
                        name = node.target.id
                        default = inspect.Parameter.empty if node.value is None else None
                        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
                        fields[name] = inspect.Parameter(name, kind, default=default)
        # A field without a default may stand behind one that has it, as keywords only.
        ordered = sorted(fields.values(), key=lambda p: p.default is not inspect.Parameter.empty)
        return inspect.Signature(ordered)


def signature_of(arguments: ast.arguments, *, drop_first: bool = False) -> inspect.Signature:
    """The names and whether they have defaults; every default is None."""
    p = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    parameters = []
    for index, argument in enumerate(positional):
        kind = p.POSITIONAL_ONLY if argument in arguments.posonlyargs else p.POSITIONAL_OR_KEYWORD
        has_default = index >= len(positional) - len(arguments.defaults)
        default = None if has_default else p.empty
        parameters.append(p(argument.arg, kind, default=default))
    if drop_first and parameters:
        parameters = parameters[1:]
    if arguments.vararg:
        parameters.append(p(arguments.vararg.arg, p.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        value = p.empty if default is None else None
        parameters.append(p(argument.arg, p.KEYWORD_ONLY, default=value))
    if arguments.kwarg:
        parameters.append(p(arguments.kwarg.arg, p.VAR_KEYWORD))
    return inspect.Signature(parameters)


@functools.cache
def class_members(node: ast.ClassDef) -> dict[str, ast.AST]:
    """What the body defines, and what methods assign to the instance."""
    names, _ = _names_of(node.body)
    members: dict[str, Any] = {name: nodes[0] for name, nodes in names.items()}
    for method in ast.walk(node):
        if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) or not method.args.args:
            continue
        first = method.args.args[0].arg
        annotations = {each.arg: each.annotation for each in method.args.args}
        for each in ast.walk(method):
            is_assign = isinstance(each, ast.Assign)
            targets = [*each.targets] if is_assign else [getattr(each, "target", None)]
            targets += [e for t in targets if isinstance(t, ast.Tuple) for e in t.elts]
            for target in targets:
                is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == first
                if is_own and target.attr not in members:
                    each.arguments_of_method = annotations  # type: ignore[attr-defined]
                    members[target.attr] = each
    for slots in (names.get("__slots__") or [])[:1]:
        members |= {s: slots for s in ast.literal_eval(getattr(slots, "value", slots))}
    return members


def _names_of(body: Sequence[ast.stmt]) -> tuple[dict[str, list[ast.AST]], list[ast.ImportFrom]]:
    """Names that statements bind, those in branches and loops among them."""
    names: dict[str, list[ast.AST]] = {}
    stars: list[ast.ImportFrom] = []
    waiting = list(body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.setdefault(node.name, []).append(node)
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if alias.name == "*":
                    stars.append(node)
                else:
                    name = alias.asname or alias.name.split(".")[0]
                    names.setdefault(name, []).append(node)
            continue
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                names.setdefault(child.id, []).append(node)
        for field in ("body", "orelse", "finalbody", "handlers"):
            for child in getattr(node, field, None) or ():
                waiting += child.body if isinstance(child, ast.ExceptHandler) else [child]
    return names, stars


def _decorators(node: Any) -> list[str]:
    found = []
    for each in getattr(node, "decorator_list", ()):
        each = each.func if isinstance(each, ast.Call) else each
        found.append(ast.unparse(each).rpartition(".")[2])
    return found


def _has_fields(of: Definition | ast.expr) -> bool:
    if isinstance(of, Definition):
        return any(name in ("dataclass", "config") for name in _decorators(of.node))
    return ast.unparse(of).rpartition(".")[2] in ("BaseModel", "NamedTuple", "Struct")


@functools.cache
def _external_has(base: str, name: str) -> bool:
    """Whether a base class of another package has it, as far as that can be imported here."""
    path = {"nn.Module": "torch.nn.Module", "Module": "torch.nn.Module"}.get(base, base)
    path = path.partition("[")[0]
    module, _, attribute = path.rpartition(".")
    for candidate in (module, "typing", "abc", "enum", "builtins"):
        if candidate.partition(".")[0] not in _LOOKED_UP:
            continue
        with contextlib.suppress(ImportError, AttributeError):
            return hasattr(getattr(importlib.import_module(candidate), attribute), name)
    return True
