"""Makes the mutants of a module. Each differs from it in one place of the syntax tree."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Kind = Literal["body", "default", "field", "constant"]
"""Where the change is: in the body of a function, the default of a parameter or of a field of a
class, or in a constant of the module."""

_SWAPPED: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitAnd: (ast.BitOr,),
    ast.USub: (ast.UAdd,),
    ast.Break: (ast.Continue,),
    ast.Continue: (ast.Break,),
}
_OPERATORS: dict[type[ast.AST], str] = {ast.And: "and", ast.Or: "or"}
_RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any"}
Node = TypeVar("Node", bound=ast.AST)
_UNSEEN_FIELDS = {"annotation", "returns", "decorator_list", "bases", "keywords"}
"""The fields of definitions that are no behavior."""


@dataclass(frozen=True, slots=True)
class Change:
    """Replaces ``field`` of ``owner``, or its element at ``position``, by ``new``."""

    owner: ast.AST
    field: str
    position: int | None
    new: Any
    """A node, or None: the element is removed."""

    def apply(self) -> Any:
        """Make the change; return what `undo` needs."""
        value = getattr(self.owner, self.field)
        if self.position is None:
            setattr(self.owner, self.field, self.new)
        else:
            new = [] if self.new is None else [self.new]
            changed = [*value[: self.position], *new, *value[self.position + 1 :]]
            setattr(self.owner, self.field, changed)
        return value

    def undo(self, value: Any) -> None:
        """Take the change back."""
        setattr(self.owner, self.field, value)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a module. ``name`` stays the same while the code around it changes."""

    name: str
    scope: str
    """The qualified name of the function or class, or the name of the constant."""
    kind: Kind
    target: str
    """The parameter or field whose default is changed; else empty."""
    lines: range
    """The lines of the statement. Without one of them, a test cannot see the change."""
    change: Change


def find_mutants(tree: ast.Module) -> list[Mutant]:
    """Return all mutants of a module, in the order of the source."""
    read = _names_in_functions(tree)
    found = [mutant for statement in tree.body for mutant in _in_module(statement, read)]
    seen: Counter[str] = Counter()
    unique = []
    for mutant in found:
        seen[mutant.name] += 1
        if seen[mutant.name] > 1:  # the same text twice in one function
            mutant = _renamed(mutant, f"{mutant.name} ({seen[mutant.name]})")  # noqa: PLW2901
        unique.append(mutant)
    return unique


def _renamed(mutant: Mutant, name: str) -> Mutant:
    return Mutant(name, mutant.scope, mutant.kind, mutant.target, mutant.lines, mutant.change)


def _names_in_functions(tree: ast.Module) -> frozenset[str]:
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    return frozenset(
        node.id for each in functions for node in ast.walk(each) if isinstance(node, ast.Name)
    )


def _in_module(statement: ast.stmt, read: frozenset[str]) -> Iterator[Mutant]:
    """Yield the mutants of a statement. ``read`` are the names that functions of the module read.

    A private constant that no function reads is left out: it has its effect at the import alone.
    """
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _in_function(statement, statement.name)
    elif isinstance(statement, ast.ClassDef):
        yield from _in_class(statement)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
        if not isinstance(target, ast.Name) or not target.id.isupper():
            return
        if not target.id.startswith("_") or target.id in read:
            for child in _changes(statement, statement):
                yield _mutant(child, target.id, "constant", statement)


def _in_class(definition: ast.ClassDef) -> Iterator[Mutant]:
    # The fields of other classes, such as models of pydantic, are read when they are defined.
    is_dataclass = any("dataclass" in ast.unparse(each) for each in definition.decorator_list)
    for statement in definition.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _in_function(statement, f"{definition.name}.{statement.name}")
        elif (
            is_dataclass
            and isinstance(statement, ast.AnnAssign)
            and isinstance(statement.value, ast.Constant)
        ):
            assert isinstance(statement.target, ast.Name)
            for child in _changes(statement, statement):
                yield _mutant(child, definition.name, "field", statement, statement.target.id)


def _in_function(function: ast.FunctionDef | ast.AsyncFunctionDef, scope: str) -> Iterator[Mutant]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first = len(positional) - len(arguments.defaults)
    for field, names, values in (
        ("defaults", positional[first:], arguments.defaults),
        ("kw_defaults", arguments.kwonlyargs, arguments.kw_defaults),
    ):
        for position, (argument, value) in enumerate(zip(names, values, strict=True)):
            for new in _other_constants(value):
                change = Change(arguments, field, position, new)
                before = f"{argument.arg}={ast.unparse(value)}" if value else ""
                text = f"{before} → {argument.arg}={ast.unparse(new)}"
                yield _mutant((change, text), scope, "default", function, argument.arg)
    for statement, field, owner in _statements(function):
        for child in _statement_changes(statement, field, owner):
            yield _mutant(child, scope, "body", statement)


def _mutant(
    child: tuple[Change, str], scope: str, kind: Kind, statement: ast.stmt, target: str = ""
) -> Mutant:
    change, text = child
    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    return Mutant(f"{scope}: {text}", scope, kind, target, lines, change)


def _statements(owner: ast.AST) -> Iterator[tuple[ast.stmt, str, ast.AST]]:
    """Yield the statements inside another, with the field and the node that hold each."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        value = getattr(owner, field, None)
        for statement in value if isinstance(value, list) else ():
            if isinstance(statement, ast.stmt):
                yield statement, field, owner
            yield from _statements(statement)


def _statement_changes(
    statement: ast.stmt, field: str, owner: ast.AST
) -> Iterator[tuple[Change, str]]:
    position = getattr(owner, field).index(statement)
    text = ast.unparse(statement)
    if (
        isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        or _is_docstring(statement)
        or _is_logging(statement)
    ):
        return
    if isinstance(statement, ast.Expr | ast.Raise | ast.AugAssign) or (
        isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute)
    ):
        yield Change(owner, field, position, _at(ast.Pass(), statement)), f"{text} → pass"
    elif isinstance(statement, ast.Return) and not _is_none_or_bool(statement.value):
        new = _at(ast.Return(ast.Constant(None)), statement)
        yield Change(owner, field, position, new), f"{text} → return None"
    elif isinstance(statement, ast.Break | ast.Continue):
        other = _at(_SWAPPED[type(statement)][0](), statement)
        yield Change(owner, field, position, other), f"{text} → {ast.unparse(other)}"
    if isinstance(statement, ast.Raise):
        return  # the text of an error is no decision
    yield from _changes(statement, statement)


def _changes(node: ast.AST, statement: ast.stmt) -> Iterator[tuple[Change, str]]:
    """Yield the changes inside the expressions of a statement."""
    yield from _own_changes(node)
    for field, value in ast.iter_fields(node):
        if field in _UNSEEN_FIELDS and isinstance(node, ast.stmt | ast.arg):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.match_case):
                yield from _changes(child.pattern, statement)
                yield from _own_changes(child)
                yield from _changes(child.guard, statement) if child.guard else ()
            elif isinstance(child, ast.AST) and not isinstance(
                child, ast.stmt | ast.JoinedStr | ast.ExceptHandler
            ):
                yield from _changes(child, statement)


def _own_changes(node: ast.AST) -> Iterator[tuple[Change, str]]:
    for change in (
        *_condition_changes(node),
        *_operator_changes(node),
        *_element_changes(node),
        *_constant_changes(node),
    ):
        yield change, _describe(change)


def _describe(change: Change) -> str:
    """Return what is there and what takes its place, as short as is clear."""
    node = change.owner
    old = getattr(node, change.field)
    old = old if change.position is None else old[change.position]
    if isinstance(node, ast.BoolOp) and change.field == "op":
        first = ast.unparse(node.values[0])
        return f"{_OPERATORS[type(old)]} → {_OPERATORS[type(change.new)]} after {first}"
    if change.new is None:
        return f"{ast.unparse(old)} → nothing"
    if isinstance(old, ast.expr) and not isinstance(old, ast.Constant):
        return f"{ast.unparse(old)} → {ast.unparse(change.new)}"
    before = _text(node)
    value = change.apply()
    after = _text(node)
    change.undo(value)
    return f"{before} → {after}"


def _condition_changes(node: ast.AST) -> Iterator[Change]:
    """A condition is always true, or always false."""
    if isinstance(node, ast.comprehension):
        for position, each in enumerate(node.ifs):
            for constant in (True, False):
                yield Change(node, "ifs", position, _at(ast.Constant(constant), each))
    elif isinstance(node, ast.If | ast.IfExp | ast.match_case):
        field = "guard" if isinstance(node, ast.match_case) else "test"
        test = getattr(node, field)
        for constant in (True, False) if test is not None else ():
            yield Change(node, field, None, _at(ast.Constant(constant), test))


def _operator_changes(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=operators):
            for position, operator in enumerate(operators):
                for other in _SWAPPED.get(type(operator), ()):
                    yield Change(node, "ops", position, other())
        case ast.BoolOp() | ast.BinOp() | ast.UnaryOp() | ast.AugAssign():
            for other in _SWAPPED.get(type(node.op), ()):
                yield Change(node, "op", None, other())
        case ast.Call(func=ast.Name(id=name)) if name in _RENAMED:
            yield Change(node, "func", None, _at(ast.Name(_RENAMED[name], ast.Load()), node))
    for field, value in ast.iter_fields(node):  # "not" is removed
        for position, element in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(element, ast.UnaryOp) and isinstance(element.op, ast.Not):
                where = position if isinstance(value, list) else None
                yield Change(node, field, where, element.operand)


def _element_changes(node: ast.AST) -> Iterator[Change]:
    """An element or a keyword argument is removed, or an operand of ``and`` or ``or`` is."""
    if isinstance(node, ast.BoolOp):
        neutral = isinstance(node.op, ast.And)
        for position, value in enumerate(node.values):
            if not isinstance(value, ast.Constant):  # 0 and "" often behave as False does
                yield Change(node, "values", position, _at(ast.Constant(neutral), value))
        return
    fields: dict[type[ast.AST], str] = {
        ast.List: "elts",
        ast.Tuple: "elts",
        ast.Set: "elts",
        ast.Call: "keywords",
    }
    field = fields.get(type(node))
    if field is None or not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        return
    elements = getattr(node, field)
    if len(elements) >= (1 if field == "keywords" else 2):
        for position in range(len(elements)):
            yield Change(node, field, position, None)


def _constant_changes(node: ast.AST) -> Iterator[Change]:
    for field, value in ast.iter_fields(node):
        if isinstance(value, list):
            for position, element in enumerate(value):
                for new in _other_constants(element):
                    yield Change(node, field, position, new)
        elif not isinstance(node, ast.Expr | ast.FormattedValue):
            for new in _other_constants(value):
                yield Change(node, field, None, new)


def _other_constants(value: object) -> Iterator[ast.Constant]:
    if isinstance(value, ast.Constant):
        constant = value.value
        if isinstance(constant, bool):
            yield _at(ast.Constant(not constant), value)
        elif isinstance(constant, int | float):
            yield _at(ast.Constant(constant + 1), value)
        elif isinstance(constant, str | bytes):
            other = f"other {constant}" if isinstance(constant, str) else b"other " + constant
            yield _at(ast.Constant(other), value)


def _text(node: ast.AST) -> str:
    """Return the text of a node; of a compound statement, its first line."""
    return ast.unparse(node).splitlines()[0]


def _at(node: Node, other: ast.AST) -> Node:
    return ast.fix_missing_locations(ast.copy_location(node, other))


def _is_none_or_bool(node: ast.AST | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value in (None, True, False))


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_logging(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("_log.")
