# SPDX-License-Identifier: Apache-2.0
"""The MLIR operations that the lowering's rules build, read from their source.

A rule builds an operation through jaxlib's builders (`vector.transpose`,
`memref.SubViewOp`, `dialect.ops.wgmma`). Reading the source finds all of them, even on
lines that no test executes. Elementwise operations are built from their names; the
table with these names registers them.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from tools.source_tree import ROOT

_BUILDERS = "jaxlib.mlir.dialects"


def lowering_sources() -> list[str]:
    """The text of each file of the lowering."""
    paths = sorted((ROOT / "pallas_gpu" / "lowering").rglob("*.py"))
    return [path.read_text(encoding="utf-8") for path in paths]


def emitted_operations(sources: Iterable[str]) -> set[str]:
    """The names of the operations that sources build, except for scalar code.

    Raises:
      ValueError: the name of an operation cannot be determined.
    """
    from pallas_gpu.mosaic import logical

    found: set[str] = set()
    for source in sources:
        tree = ast.parse(source)
        dialects = dict(_dialects(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                found |= _created_by_name(node)
            if not isinstance(node, ast.Attribute):
                continue
            dialect = dialects.get(ast.unparse(node.value))
            if dialect is not None:
                found |= _operation(dialect, node.attr)
    return {name for name in found if not name.startswith(logical.SCALAR)}


def _created_by_name(call: ast.Call) -> set[str]:
    """The operation of a call of `ir.Operation.create`, whose argument is a name."""
    if ast.unparse(call.func) != "ir.Operation.create":
        return set()
    name = call.args[0]
    if isinstance(name, ast.Constant):
        return {str(name.value)}
    text = ast.unparse(name)
    if text == "logical.OWN + row.name":
        return set()
    raise ValueError(f"ir.Operation.create({text}): no elementwise operation's name")


def _dialects(tree: ast.Module) -> Iterable[tuple[str, ModuleType]]:
    """The modules of builders that a source imports, with their local names."""
    from pallas_gpu.mosaic import dialect

    yield "dialect.ops", dialect.ops
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == _BUILDERS:
            for alias in node.names:
                module = importlib.import_module(f"{_BUILDERS}.{alias.name}")
                yield alias.asname or alias.name, module


def _operation(dialect: Any, attribute: str) -> set[str]:
    """The operation of an attribute of a module of builders."""
    value = getattr(dialect, attribute, None)
    if isinstance(value, type):
        name = getattr(value, "OPERATION_NAME", None)
        return set() if name is None else {str(name)}
    # The builder of `memref.extract_metadata` is `extract_metadata`; reserved words of
    # Python have an underscore appended: `scf.yield_`.
    wanted = attribute.rstrip("_")
    for other in vars(dialect).values():
        name = str(getattr(other, "OPERATION_NAME", ""))
        if name.partition(".")[2].replace(".", "_") == wanted:
            return {name}
    raise ValueError(f"{dialect.__name__}.{attribute} builds no operation of that name")
