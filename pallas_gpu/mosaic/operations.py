# SPDX-License-Identifier: Apache-2.0
"""MLIR operations of which a kernel has hundreds, created by name.

The dialects' Python classes take three times as long to create the same operation: they
convert each argument and look up its attribute's builder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jaxlib.mlir import ir


def create(
    name: str,
    result: ir.Type,
    operands: Sequence[ir.Value],
    attributes: Mapping[str, ir.Attribute] | None = None,
) -> ir.Value:
    """Creates an operation at the insertion point and returns its only result.

    Args:
      name: the operation's name with its dialect: `arith.addf`.
      result: the result's type.
      attributes: those without a default value, or with another one.
    """
    return ir.Operation.create(name, [result], operands, attributes).result


def same_type(name: str) -> Callable[..., ir.Value]:
    """Returns the emitter of an operation whose result has the type of its operands."""

    def emit(*operands: ir.Value) -> ir.Value:
        return create(name, operands[0].type, operands)

    return emit


def position(index: int) -> ir.Attribute:
    """A static position in a vector or a structure."""
    return ir.DenseI64ArrayAttr.get([index])


def inline_assembly(
    result: ir.Type,
    operands: Sequence[ir.Value],
    text: str,
    constraints: str,
    *,
    volatile: bool = False,
) -> ir.Value:
    """`llvm.inline_asm` with one result, a structure if it has several."""
    attributes: dict[str, ir.Attribute] = {
        "asm_string": ir.StringAttr.get(text),
        "constraints": ir.StringAttr.get(constraints),
    }
    if volatile:
        attributes["has_side_effects"] = ir.UnitAttr.get()
    return create("llvm.inline_asm", result, operands, attributes)


def fields(struct: ir.Value, types: Sequence[ir.Type]) -> list[ir.Value]:
    """The fields of a structure of the given types, in order."""
    return [
        create("llvm.extractvalue", type_, [struct], {"position": position(i)})
        for i, type_ in enumerate(types)
    ]
