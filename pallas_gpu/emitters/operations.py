# SPDX-License-Identifier: Apache-2.0
"""MLIR operations of which a kernel has hundreds, created by name.

The dialects' Python classes take three times as long to create the same operation: they
convert each argument and look up its attribute's builder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jaxlib.mlir import ir

# An index of `llvm.getelementptr` that is an operand.
_DYNAMIC = -(2**31)


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


def call(name: str, result: ir.Type, operands: Sequence[ir.Value]) -> ir.Value:
    """`llvm.call` of a function that the module declares."""
    sizes = {"operandSegmentSizes": [len(operands), 0], "op_bundle_sizes": []}
    lists = {key: ir.DenseI32ArrayAttr.get(x) for key, x in sizes.items()}
    callee = ir.FlatSymbolRefAttr.get(name)
    return create("llvm.call", result, operands, {"callee": callee, **lists})


def constant(type_: ir.Type, value: int) -> ir.Value:
    """`arith.constant` of an integer type."""
    attributes = {"value": ir.IntegerAttr.get(type_, value)}
    return create("arith.constant", type_, (), attributes)


def offset(pointer: ir.Value, offset_bytes: int | ir.Value) -> ir.Value:
    """`llvm.getelementptr`: the pointer plus a number of bytes, an i32 or a value."""
    static = isinstance(offset_bytes, int)
    attributes = {
        "rawConstantIndices": ir.DenseI32ArrayAttr.get(
            [offset_bytes if static else _DYNAMIC]
        ),
        "elem_type": ir.TypeAttr.get(ir.IntegerType.get_signless(8)),
    }
    operands = [pointer] if static else [pointer, offset_bytes]
    return create("llvm.getelementptr", pointer.type, operands, attributes)


def position(index: int) -> ir.Attribute:
    """A static position in a vector or a structure."""
    return ir.DenseI64ArrayAttr.get([index])


def assembly_attributes(
    text: str, constraints: str, *, volatile: bool = False
) -> dict[str, ir.Attribute]:
    """The attributes of `llvm.inline_asm`."""
    attributes: dict[str, ir.Attribute] = {
        "asm_string": ir.StringAttr.get(text),
        "constraints": ir.StringAttr.get(constraints),
    }
    if volatile:
        attributes["has_side_effects"] = ir.UnitAttr.get()
    return attributes


def inline_assembly(
    result: ir.Type,
    operands: Sequence[ir.Value],
    text: str,
    constraints: str,
    *,
    volatile: bool = False,
) -> ir.Value:
    """`llvm.inline_asm` with one result, a structure if it has several."""
    attributes = assembly_attributes(text, constraints, volatile=volatile)
    return create("llvm.inline_asm", result, operands, attributes)


def fields(struct: ir.Value, types: Sequence[ir.Type]) -> list[ir.Value]:
    """The fields of a structure of the given types, in order."""
    return [
        create("llvm.extractvalue", type_, [struct], {"position": position(i)})
        for i, type_ in enumerate(types)
    ]
