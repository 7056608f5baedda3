"""What our code uses of vllm, megatron and transformer_engine, found by reading it.

Followed are names from imports, attributes of modules and classes, instances of classes (made
here, annotated, given by an annotated function or attribute) and their attributes, local names for
any of these, dotted names in strings, `getattr`, `setattr` and `import_module` with constants.
What comes out of containers, closures and unannotated functions is not followed; of attributes of
such things only the name is kept (`attribute_names`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cuda.upstream import PACKAGES, Definition, Source, class_members

_DOTTED = re.compile(rf"^({'|'.join(PACKAGES)})(\.\w+)+$")


@dataclass(frozen=True)
class Use:
    """One use of a name of another package.

    `kind`: "name" (it must exist), "call" (`how` are the arguments), "replace" (`how` is what takes
    its place), "override" (likewise, in a subclass), "subclass" (`how` are the methods written),
    "generic" (`how` many type parameters), "parameters" (`how` they must be called).
    """

    place: str  # file:line
    path: str
    kind: str = "name"
    how: Any = None
    bound: bool = False  # by an instance of the class
    guarded: bool = False  # where it is missing, the code goes another way


@dataclass(frozen=True)
class Arguments:
    """Of a call: how many by position, which by keyword, and whether more are unpacked into it."""

    positional: int
    keywords: tuple[str, ...]
    is_partial: bool


@dataclass
class _Thing:
    """What an expression is, as far as that is known: a dotted name, or an instance of one."""

    path: str = ""
    is_instance: bool = False
    ours: ast.AST | None = None  # a function of ours
    text: str | None = None  # a constant


@dataclass
class Uses:
    """Of all files read."""

    found: list[Use] = field(default_factory=list)
    attribute_names: dict[str, str] = field(default_factory=dict)  # name -> a place
    our_names: set[str] = field(default_factory=set)


def find_uses(folders: Mapping[Path, str], reference: Source) -> Uses:
    """Of all .py files under `folders`, named by them in places.

    `reference` tells classes from functions, and what is annotated with what.
    """
    uses = Uses()
    for folder, name in folders.items():
        for file in sorted(folder.rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            label = f"{name}/{file.relative_to(folder)}"
            _Reader(uses, label, reference, file).read(tree)
    return uses


class _Reader:
    def __init__(self, uses: Uses, label: str, reference: Source, file: Path) -> None:
        self.uses, self.label, self.reference = uses, label, reference
        self.imports_any = False
        self.own_name = f"{file.parent.name}.{file.stem}"  # of a patch
        self._calls: dict[str, list[bool]] = {}  # functions of the file: is each call guarded?
        self._guarded_functions: set[str] = set()

    def read(self, tree: ast.Module) -> None:
        text = ast.dump(tree)
        self.imports_any = any(f"'{package}" in text for package in PACKAGES)
        functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        # A patch asks in `needed` whether there is what it mends.
        if "needed" in functions and _asks(ast.unparse(functions["needed"])):
            self._guarded_functions.add("apply")
        # A function that is only called under a guard is under it. First to see who calls whom.
        uses, self.uses = self.uses, Uses()
        self._block(tree.body, {}, guarded=False)
        self.uses = uses
        for name, calls in self._calls.items():
            if name.startswith("_") and name in functions and all(calls):
                self._guarded_functions.add(name)
        self._block(tree.body, {}, guarded=False)

    # ------------------------------------------------------------------------------- statements

    def _block(self, body: list[ast.stmt], scope: dict[str, _Thing], *, guarded: bool) -> None:
        # What is imported or defined anywhere in a scope can be used by functions above it.
        for node in body:
            self._define(node, scope, guarded=guarded)
        for node in body:
            self._statement(node, scope, guarded=guarded)
            if isinstance(node, ast.If) and _asks(self._condition(node.test, scope)):
                # What follows a way out is under the same guard.
                guarded = guarded or isinstance(node.body[-1], (ast.Return, ast.Raise))

    def _define(self, node: ast.stmt, scope: dict[str, _Thing], *, guarded: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.uses.our_names.add(node.name)
            scope[node.name] = _Thing(ours=node)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                self._name(node, path, guarded=guarded)
                scope[alias.asname or alias.name] = self._thing(path)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self._name(node, alias.name, guarded=guarded)
                path = alias.name if alias.asname else alias.name.split(".")[0]
                scope[alias.asname or path] = self._thing(path)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for each in node.body:
                self._define(each, scope, guarded=guarded)

    def _statement(self, node: ast.stmt, scope: dict[str, _Thing], *, guarded: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._function(node, scope, guarded=guarded)
        elif isinstance(node, ast.ClassDef):
            self._class(node, scope, guarded=guarded)
        elif isinstance(node, ast.Try):
            caught = " ".join(ast.unparse(h.type) for h in node.handlers if h.type)
            missing = ("ImportError", "ModuleNotFoundError", "AttributeError")
            self._block(node.body, scope, guarded=guarded or any(m in caught for m in missing))
            for part in (*[handler.body for handler in node.handlers], node.orelse, node.finalbody):
                self._block(part, scope, guarded=guarded)
        elif isinstance(node, (ast.If, ast.While)):
            self._expression(node.test, scope, guarded=guarded)
            asks = guarded or _asks(self._condition(node.test, scope))
            self._block(node.body, scope, guarded=asks)
            self._block(node.orelse, scope, guarded=asks)
        else:
            self._simple(node, scope, guarded=guarded)

    def _condition(self, test: ast.expr, scope: dict[str, _Thing]) -> str:
        """The text of a test, with that of local names that hold an answer."""
        names = [n.id for n in ast.walk(test) if isinstance(n, ast.Name)]
        return ast.unparse(test) + " ".join(scope[n].text or "" for n in names if n in scope)

    def _simple(self, node: ast.stmt, scope: dict[str, _Thing], *, guarded: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, scope, guarded=guarded)
            elif isinstance(child, ast.withitem):
                self._expression(child.context_expr, scope, guarded=guarded)
                if isinstance(child.optional_vars, ast.Name):
                    scope[child.optional_vars.id] = _Thing()
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = self._evaluate(node.value, scope)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._assigned(node, target, value, scope, guarded=guarded)
        for part in ("body", "orelse"):
            if isinstance(getattr(node, part, None), list):
                for target in ast.walk(getattr(node, "target", ast.Pass())):
                    if isinstance(target, ast.Name):
                        scope[target.id] = _Thing()
                self._block(getattr(node, part), scope, guarded=guarded)

    def _assigned(
        self,
        node: Any,
        target: ast.expr,
        value: _Thing,
        scope: dict[str, _Thing],
        *,
        guarded: bool,
    ) -> None:
        if isinstance(target, ast.Name):
            if isinstance(node, ast.AnnAssign) and not value.path:
                value = self._annotated(node.annotation, scope)
            text = ast.unparse(node.value)
            scope[target.id] = _Thing(text=text) if _asks(text) else value
            return
        if isinstance(target, ast.Tuple):
            for each in target.elts:
                self._assigned(node, each, _Thing(), scope, guarded=guarded)
            return
        if isinstance(target, ast.Attribute):
            of = self._evaluate(target.value, scope)
            if of.path and not of.is_instance and isinstance(value.ours, ast.FunctionDef):
                self._add(node, f"{of.path}.{target.attr}", "replace", value.ours, guarded=guarded)

    def _function(self, node: Any, scope: dict[str, _Thing], *, guarded: bool, cls: Any = None):
        for expression in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if expression is not None:
                self._expression(expression, scope, guarded=guarded)
        guarded = guarded or node.name in self._guarded_functions
        inner = dict(scope)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in (*arguments, node.args.vararg, node.args.kwarg):
            if argument is not None:
                self.uses.our_names.add(argument.arg)
                inner[argument.arg] = self._annotated(argument.annotation, scope)
        if (
            cls is not None
            and arguments
            and "staticmethod" not in ast.unparse(node).split("def")[0]
        ):
            inner[arguments[0].arg] = cls
        self._block(node.body, inner, guarded=guarded)

    def _class(self, node: ast.ClassDef, scope: dict[str, _Thing], *, guarded: bool) -> None:
        own = _Thing(ours=node)
        for base in node.bases:
            self._expression(base, scope, guarded=guarded)
            inside = base.slice if isinstance(base, ast.Subscript) else None
            thing = self._evaluate(base.value if inside is not None else base, scope)
            if not thing.path or not self._is_class(thing.path):
                continue
            own = _Thing(thing.path, is_instance=True, ours=node)
            methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
            self._add(node, thing.path, "subclass", tuple(methods), guarded=guarded)
            if inside is not None:
                count = len(inside.elts) if isinstance(inside, ast.Tuple) else 1
                self._add(node, thing.path, "generic", count, guarded=guarded)
            for name, method in methods.items():
                self._add(method, f"{thing.path}.{name}", "override", method, guarded=guarded)
        inner = dict(scope)
        for each in node.body:
            for target in ast.walk(each):  # attributes are ours, too
                if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                    self.uses.our_names.add(target.attr)
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    self.uses.our_names.add(target.id)
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.uses.our_names.add(each.name)
                self._function(each, scope, guarded=guarded, cls=own)
            else:
                self._statement(each, inner, guarded=guarded)

    # ------------------------------------------------------------------------------ expressions

    def _expression(self, node: ast.expr, scope: dict[str, _Thing], *, guarded: bool) -> None:
        """Note everything that an expression uses."""
        for each in _outermost(node):
            if isinstance(each, ast.Lambda):
                inner = {**scope, **{a.arg: _Thing() for a in each.args.args}}
                self._expression(each.body, inner, guarded=guarded)
            elif isinstance(each, ast.IfExp):
                asks = _asks(self._condition(each.test, scope))
                for part in (each.test, each.body, each.orelse):
                    self._expression(part, scope, guarded=guarded or asks)
            elif isinstance(each, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
                inner = dict(scope)
                for generator in each.generators:
                    self._expression(generator.iter, inner, guarded=guarded)
                    for target in ast.walk(generator.target):
                        if isinstance(target, ast.Name):
                            inner[target.id] = _Thing()
                    for test in generator.ifs:
                        self._expression(test, inner, guarded=guarded)
                parts = [each.key, each.value] if isinstance(each, ast.DictComp) else [each.elt]
                for part in parts:
                    self._expression(part, inner, guarded=guarded)
            elif isinstance(each, ast.Attribute):
                self._attribute(each, scope, guarded=guarded)
            elif isinstance(each, ast.Call):
                self._call(each, scope, guarded=guarded)
            elif isinstance(each, ast.Constant) and isinstance(each.value, str):
                if _DOTTED.match(each.value) and each.value != self.own_name:
                    self._name(each, each.value, guarded=True)  # what for is not known

    def _attribute(self, node: ast.Attribute, scope: dict[str, _Thing], *, guarded: bool) -> None:
        of = self._evaluate(node.value, scope)
        if not of.path:
            if self.imports_any and of.ours is None and not guarded:
                self.uses.attribute_names.setdefault(node.attr, f"{self.label}:{node.lineno}")
        elif not (isinstance(of.ours, ast.ClassDef) and node.attr in class_members(of.ours)):
            path = f"{of.path}.{node.attr}"
            self._add(node, path, bound=of.is_instance, guarded=guarded)

    def _call(self, node: ast.Call, scope: dict[str, _Thing], *, guarded: bool) -> None:
        name = ast.unparse(node.func)
        self._calls.setdefault(name, []).append(guarded)
        texts = [self._evaluate(argument, scope).text for argument in node.args]
        if name in ("getattr", "setattr") and len(texts) >= 2 and texts[1]:
            of = self._evaluate(node.args[0], scope)
            default = name == "getattr" and len(texts) == 3
            if of.path:
                path = f"{of.path}.{texts[1]}"
                self._add(node, path, bound=of.is_instance, guarded=guarded or default)
            return
        if name.endswith("import_module") and texts and texts[0] and _DOTTED.match(texts[0]):
            self._name(node, texts[0], guarded=guarded)
            return
        if name == "require_parameters":
            target = self._evaluate(node.args[0], scope)
            wanted = [t for a in node.args[1:] for t in self._texts(a, scope)]
            if target.path and None not in wanted:
                self._add(node, target.path, "parameters", tuple(wanted), guarded=guarded)
        of = self._evaluate(node.func, scope)
        if of.path and not (of.is_instance and isinstance(of.ours, ast.ClassDef)):
            bound = of.is_instance or self._by_instance(node.func, scope)
            self._add(node, of.path, "call", _arguments(node), bound=bound, guarded=guarded)

    def _texts(self, node: ast.expr, scope: dict[str, _Thing]) -> list[str | None]:
        if isinstance(node, ast.Starred) and isinstance(node.value, (ast.Tuple, ast.List)):
            return [self._evaluate(each, scope).text for each in node.value.elts]
        return [self._evaluate(node, scope).text]

    def _by_instance(self, func: ast.expr, scope: dict[str, _Thing]) -> bool:
        return isinstance(func, ast.Attribute) and self._evaluate(func.value, scope).is_instance

    # ------------------------------------------------------------------------------- evaluation

    def _evaluate(self, node: ast.expr | None, scope: dict[str, _Thing]) -> _Thing:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return _Thing(text=node.value)
        if isinstance(node, ast.Name):
            return scope.get(node.id, _Thing())
        if isinstance(node, ast.JoinedStr):
            parts = [
                self._evaluate(p.value if isinstance(p, ast.FormattedValue) else p, scope).text
                for p in node.values
            ]
            return _Thing(text=None if None in parts else "".join(p for p in parts if p))
        if isinstance(node, ast.Attribute):
            of = self._evaluate(node.value, scope)
            if isinstance(of.ours, ast.ClassDef) and node.attr in class_members(of.ours):
                return _Thing()
            if of.path and of.is_instance:
                return self._of_instance(of, node.attr)
            return self._thing(f"{of.path}.{node.attr}") if of.path else _Thing()
        if isinstance(node, ast.Call):
            return self._result(node, scope)
        return _Thing()

    def _of_instance(self, of: _Thing, name: str) -> _Thing:
        cls = self.reference.resolve(of.path)
        if cls is None or cls.kind != "class":
            return _Thing()
        member = self.reference.member(cls, name)
        if member is not None and member.kind == "function" and not member.is_property:
            return _Thing(f"{of.path}.{name}")
        return self._instance(self.reference.attribute_class(cls, name))

    def _result(self, node: ast.Call, scope: dict[str, _Thing]) -> _Thing:
        if ast.unparse(node.func) == "super" and not node.args:
            # Of the first argument of the method, which stands for the instance.
            first = next((t for t in scope.values() if isinstance(t.ours, ast.ClassDef)), _Thing())
            own = [t for n, t in scope.items() if n in ("self", "cls")]
            thing = own[0] if own else first
            return _Thing(thing.path, is_instance=True) if thing.path else _Thing()
        if ast.unparse(node.func).endswith("import_module") and node.args:
            return self._thing(self._evaluate(node.args[0], scope).text or "")
        if ast.unparse(node.func) == "getattr" and len(node.args) == 2:
            name = self._evaluate(node.args[1], scope).text
            of = self._evaluate(node.args[0], scope)
            return self._thing(f"{of.path}.{name}") if of.path and name else _Thing()
        of = self._evaluate(node.func, scope)
        if of.is_instance and isinstance(of.ours, ast.ClassDef):
            return of  # cls(...)
        found = self.reference.resolve(of.path) if of.path else None
        if found is None or found.kind not in ("class", "function"):
            return _Thing()
        if found.kind == "class":
            return _Thing(of.path, is_instance=True)
        assert found.module is not None
        return self._instance(self.reference.annotated(found.module, found.node.returns))

    def _annotated(self, annotation: ast.expr | None, scope: dict[str, _Thing]) -> _Thing:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            sides = [s for s in (annotation.left, annotation.right) if ast.unparse(s) != "None"]
            return self._annotated(sides[0], scope) if len(sides) == 1 else _Thing()
        thing = self._evaluate(annotation, scope)
        is_class = thing.path and self._is_class(thing.path)
        return _Thing(thing.path, is_instance=True) if is_class else _Thing()

    def _is_class(self, path: str) -> bool:
        found = self.reference.resolve(path)
        return found is not None and found.kind == "class"

    @staticmethod
    def _instance(cls: Definition | None) -> _Thing:
        return _Thing(cls.path, is_instance=True) if cls is not None else _Thing()

    @staticmethod
    def _thing(path: str) -> _Thing:
        return _Thing(path) if path.partition(".")[0] in PACKAGES else _Thing()

    # ------------------------------------------------------------------------------------ notes

    def _name(self, node: Any, path: str, *, guarded: bool) -> None:
        if path.partition(".")[0] in PACKAGES:
            self._add(node, path, guarded=guarded)

    def _add(
        self,
        node: Any,
        path: str,
        kind: str = "name",
        how: Any = None,
        *,
        bound: bool = False,
        guarded: bool = False,
    ) -> None:
        place = f"{self.label}:{node.lineno}"
        self.uses.found.append(Use(place, path, kind, how, bound, guarded))


def _asks(text: str) -> bool:
    """Whether a condition asks if something of another package is there."""
    return any(ask in text for ask in ("hasattr", "find_spec"))


def _arguments(node: ast.Call) -> Arguments:
    stars = [a for a in node.args if isinstance(a, ast.Starred)]
    keywords = tuple(k.arg for k in node.keywords if k.arg is not None)
    unpacked = bool(stars) or len(keywords) < len(node.keywords)
    return Arguments(len(node.args) - len(stars), keywords, unpacked)


def _outermost(node: ast.expr) -> Iterator[ast.AST]:
    """The expression and all in it; not what is in scopes of its own, which it yields whole."""
    yield node
    scopes = (ast.Lambda, ast.IfExp, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
    if isinstance(node, scopes):
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _outermost(child)
        elif isinstance(child, ast.keyword):
            yield from _outermost(child.value)
        elif isinstance(child, ast.AST):
            for each in ast.iter_child_nodes(child):
                if isinstance(each, ast.expr):
                    yield from _outermost(each)
