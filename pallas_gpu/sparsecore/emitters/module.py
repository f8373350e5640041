# SPDX-License-Identifier: Apache-2.0
"""The frame of a kernel: one function, its grid, its arrays, its shared memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from pallas_gpu.sparsecore.emitters.context import context
from pallas_gpu.sparsecore.emitters.values import ArrayType


class Module:
    """A module with one function; code is emitted inside its `with` block.

    Args:
      name: the function's name.
      grid: cores, and subcores if vector subcores run it.
      arrays: operands, then results.
      scratch: memory that all subcores of a core share.
    """

    def __init__(
        self,
        name: str,
        grid: Sequence[int],
        arrays: Sequence[ArrayType],
        scratch: Sequence[ArrayType] = (),
    ):
        self._context = context()
        self._entered: list[Any] = []
        with self._context, ir.Location.unknown():
            self.module = ir.Module.create()
            symbol = ir.StringAttr.get(name)
            self.module.operation.attributes["sym_name"] = symbol
            index = ir.IntegerType.get_signless(32)
            types = [t.type for t in (*arrays, *scratch)]
            with ir.InsertionPoint(self.module.body):
                signature: Any = ([index] * len(grid) + types, [])
                self._function = func.FuncOp(_symbol(name), signature)
            self._describe(grid, arrays, len(scratch))
            self._block = self._function.add_entry_block()
        arguments = list(self._block.arguments)
        self.positions = arguments[: len(grid)]
        given = zip(arguments[len(grid) :], (*arrays, *scratch), strict=True)
        at = ir.InsertionPoint(self._block)
        with self._context, ir.Location.unknown(), at:
            handles = [t.handle(value) for value, t in given]
        self.arrays = handles[: len(arrays)]
        self.scratch = handles[len(arrays) :]

    def _describe(
        self, grid: Sequence[int], arrays: Sequence[ArrayType], scratch: int
    ) -> None:
        """Adds the attributes that libtpu requires."""
        is_vector = len(grid) == 2
        kind = "sc_vector_subcore" if is_vector else "sc_scalar_subcore"
        axes = ("core_parallel", "subcore_parallel")[: len(grid)]
        dimensions = ", ".join(f"d{i}" for i in range(len(grid)))
        windows = [
            f"{{transform_indices = affine_map<({dimensions}) -> "
            f"({', '.join('0' * len(t.shape))})>}}"
            for t in arrays
        ]
        i64 = ir.IntegerType.get_signless(64)
        attributes = self._function.attributes
        attributes["tpu.core_type"] = ir.Attribute.parse(f"#tpu.core_type<{kind}>")
        attributes["iteration_bounds"] = ir.DenseI64ArrayAttr.get(list(grid))
        attributes["dimension_semantics"] = ir.Attribute.parse(
            "[" + ", ".join(f"#tpu.dimension_semantics<{a}>" for a in axes) + "]"
        )
        attributes["scratch_operands"] = ir.IntegerAttr.get(i64, scratch)
        attributes["scalar_prefetch"] = ir.IntegerAttr.get(i64, 0)
        attributes["window_params"] = ir.Attribute.parse(f"[{', '.join(windows)}]")

    def __enter__(self) -> Module:
        for manager in (
            self._context,
            ir.Location.unknown(self._context),
            ir.InsertionPoint(self._block),
        ):
            manager.__enter__()
            self._entered.append(manager)
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            func.return_([])
        while self._entered:
            self._entered.pop().__exit__(kind, value, traceback)


def _symbol(name: str) -> str:
    """Returns a name as an identifier of ASCII."""
    cleaned = re.sub(r"[^0-9A-Za-z_]", "_", name)
    return cleaned if cleaned and not cleaned[0].isdigit() else f"kernel_{cleaned}"
