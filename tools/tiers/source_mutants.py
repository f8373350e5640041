# SPDX-License-Identifier: Apache-2.0
"""Wrong versions of the package: one operator of a line swapped, or the line dropped.

A mutant is a line of a function. It is applied to the process that runs: the functions
that exist get other code. What runs at import, once, is not mutated.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import gc
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.source_tree import ROOT

# Files whose lines are mutated: what emits, and what models the hardware.
FOLDERS = (
    "pallas_gpu/checks",
    "pallas_gpu/composites",
    "pallas_gpu/emulator",
    "pallas_gpu/entry",
    "pallas_gpu/layouts",
    "pallas_gpu/lowering",
    "pallas_gpu/emitters",
    "pallas_gpu/memory",
    "pallas_gpu/ops",
    "pallas_gpu/pipeline",
    "pallas_gpu/primitives",
    "pallas_gpu/program/passes",
    "pallas_gpu/types",
    "pallas_gpu/resources.py",
)
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
# What becomes of a statement, and a function that changes it in its tree.
type Change = tuple[str, Callable[[], None]]
_DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise, ast.Delete)


@dataclasses.dataclass(frozen=True)
class Site:
    """A line that can be mutated.

    Attributes:
      path: of its file, from the repository's root.
      function: the outermost function that has it, by its qualified name.
      line: its number in the file.
      change: what becomes of it.
    """

    path: str
    function: str
    line: int
    change: str

    @property
    def name(self) -> str:
        return f"{self.path} {self.function}: {self.change}"


def files() -> list[str]:
    """The paths of the files whose lines are mutated, in order."""
    found: list[Path] = []
    for name in FOLDERS:
        path = ROOT / name
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [str(path.relative_to(ROOT)) for path in found]


def sites(path: str) -> list[Site]:
    """The mutants of a file: at most one of each line."""
    found: dict[int, Site] = {}
    for function, qualname in _functions(_tree(path)):
        for statement in _statements(function.body):
            change = _change(statement)
            if change is not None:
                line = statement.lineno
                found.setdefault(line, Site(path, qualname, line, change[0]))
    return [found[line] for line in sorted(found)]


def exists(mutant: str) -> bool:
    """Whether the function of a mutant's name is still there."""
    path, _, rest = mutant.partition(" ")
    function = rest.partition(":")[0]
    names = (name for _, name in _functions(_tree(path)))
    return (ROOT / path).exists() and function in names


def every(step: int, first: int = 0) -> list[Site]:
    """Each n-th mutant of all, counted through the files in order."""
    return [site for path in files() for site in sites(path)][first::step]


def apply(site: Site) -> int:
    """Gives the functions of this process that have the line the mutant's code.

    Returns:
      The number of functions that have changed.
    """
    tree = ast.parse((ROOT / site.path).read_text(encoding="utf-8"))
    for function, qualname in _functions(tree):
        for statement in _statements(function.body):
            if statement.lineno == site.line and qualname == site.function:
                change = _change(statement)
                if change is not None:
                    change[1]()
    ast.fix_missing_locations(tree)
    file = str(ROOT / site.path)
    module = compile(tree, file, "exec", dont_inherit=True)
    new = {(c.co_qualname, c.co_firstlineno): c for c in _codes(module)}
    changed = 0
    for live in _live_functions().get(file, ()):
        old = live.__code__
        code = new.get((old.co_qualname, old.co_firstlineno))
        if code is not None and code.co_freevars == old.co_freevars and code != old:
            live.__code__ = code
            changed += 1
    return changed


@functools.cache
def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@functools.cache
def _live_functions() -> dict[str, list[types.FunctionType]]:
    """The functions of this process, by their file."""
    gc.unfreeze()
    found: dict[str, list[types.FunctionType]] = {}
    for live in gc.get_objects():
        if type(live) is types.FunctionType:
            found.setdefault(live.__code__.co_filename, []).append(live)
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield const
            yield from _codes(const)


def _functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[ast.FunctionDef, str]]:
    """The outermost functions of a module and of its classes, with their names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node, prefix + node.name
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from _functions(node, prefix)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)
        for case in getattr(statement, "cases", []):
            yield from _statements(case.body)


def _change(statement: ast.stmt) -> Change | None:
    """What a mutant makes of a statement: a text, and a function that does it."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.With):
        return None
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return None  # a docstring
    for expression in _own(statement):
        for node in ast.walk(expression):
            swapped = _swapped(node)
            if swapped is not None:
                text = ast.unparse(node)
                return f"{text} -> {swapped[0]}", swapped[1]
    if not isinstance(statement, _DROPPED):
        return None
    text = ast.unparse(statement)

    def drop() -> None:
        # In place: the statement becomes one without an effect.
        dropped: Any = statement
        dropped.__class__ = ast.Expr
        dropped.value = ast.copy_location(ast.Constant(None), statement)

    return f"{' '.join(text.split())[:90]} dropped", drop


def _own(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement, those of the statements in it aside.

    Of a local variable the annotation is not evaluated.
    """
    annotation = getattr(statement, "annotation", None)
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr) and child is not annotation:
            yield child


def _swapped(node: ast.AST) -> Change | None:
    """Another operator for that of an expression: its text, and how it is put in."""
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in _COMPARISONS:
            new: Any = _COMPARISONS[type(op)]()
            rest = node.ops[1:]
            changed = ast.Compare(node.left, [new, *rest], node.comparators)
            return ast.unparse(changed), lambda: setattr(node, "ops", [new, *rest])
        case ast.BoolOp():
            new = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            changed_bool = ast.BoolOp(new, node.values)
            return ast.unparse(changed_bool), lambda: setattr(node, "op", new)
        case ast.BinOp(left=ast.Constant(value=str())):
            return None  # a text
        case ast.BinOp() if type(node.op) in _OPERATORS:
            new = _OPERATORS[type(node.op)]()
            changed_op = ast.BinOp(node.left, new, node.right)
            return ast.unparse(changed_op), lambda: setattr(node, "op", new)
        case ast.IfExp():
            test = ast.UnaryOp(ast.Not(), node.test)
            return f"not {ast.unparse(node.test)}", lambda: setattr(node, "test", test)
    return None
