# SPDX-License-Identifier: Apache-2.0
"""Wrong versions of an emitted module: one operation of it replaced by another.

A mutant is applied to the module in place, and undone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

# By MLIR's numbers: less for less-or-equal, another sign, the other direction.
_CMPI = {
    0: (1,), 1: (0,), 2: (3, 4, 6), 3: (2, 7), 4: (5, 8), 5: (4, 9), 6: (7, 8, 2),
    7: (6, 3), 8: (9, 4), 9: (8, 5),
}  # fmt: skip
# The last of each is the same comparison with NaN decided the other way.
_CMPF = {
    1: (6, 8), 2: (3, 4, 9), 3: (2, 10), 4: (5, 2, 11), 5: (4, 12), 13: (8, 6),
    14: (7,),
}  # fmt: skip
# Other operations on the same types.
_OTHER = {
    "arith.addi": ("arith.subi",),
    "arith.subi": ("arith.addi",),
    "arith.muli": ("arith.addi",),
    "arith.andi": ("arith.ori",),
    "arith.ori": ("arith.andi", "arith.xori"),
    "arith.xori": ("arith.ori",),
    "arith.maxsi": ("arith.minsi", "arith.maxui"),
    "arith.minsi": ("arith.maxsi", "arith.minui"),
    "arith.maxui": ("arith.minui", "arith.maxsi"),
    "arith.minui": ("arith.maxui", "arith.minsi"),
    "arith.divsi": ("arith.divui",),
    "arith.remsi": ("arith.remui",),
    "arith.divui": ("arith.divsi",),
    "arith.remui": ("arith.remsi",),
    "arith.shrsi": ("arith.shrui",),
    "arith.shrui": ("arith.shrsi",),
    "arith.shli": ("arith.shrui",),
    "arith.addf": ("arith.subf",),
    "arith.subf": ("arith.addf",),
    "arith.mulf": ("arith.divf",),
    "arith.divf": ("arith.mulf",),
    "arith.maximumf": ("arith.minimumf",),
    "arith.minimumf": ("arith.maximumf",),
    "arith.extui": ("arith.extsi",),
    "arith.extsi": ("arith.extui",),
    "arith.sitofp": ("arith.uitofp",),
    "arith.uitofp": ("arith.sitofp",),
    "math.trunc": ("math.floor", "math.roundeven"),
    "math.floor": ("math.ceil",),
    "math.ceil": ("math.floor",),
    "math.round": ("math.roundeven",),
    "math.roundeven": ("math.round",),
}
_MOVES = (
    *("arith.cmpi", "arith.select", "nvvm.shfl.sync", "llvm.call_intrinsic"),
    *("nvvm.ldmatrix", "nvvm.stmatrix", "vector.extract"),
    *("nvvm.redux.sync", "nvvm.vote.sync"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Mutant:
    """A change of one operation.

    Attributes:
      label: the operation and what it becomes, with its number among those alike.
      applied: a context in which the module is changed.
    """

    label: str
    applied: Callable[[], contextlib.AbstractContextManager[None]]


def mutants(
    module: ir.Module, *, moves: bool = False, combines: bool = False
) -> list[Mutant]:
    """The mutants of a kernel's module.

    Args:
      module: changed in place while a mutant is applied.
      moves: of operations that move elements only.
      combines: lanes combine what they exchange. Which of the lanes that have been
        combined before a value comes from does not matter then.
    """
    found: list[Mutant] = []
    counts: dict[str, int] = {}
    with module.context, ir.Location.unknown():
        for op in _operations(module.operation):
            number = counts[op.name] = counts.get(op.name, -1) + 1
            if moves and op.name not in _MOVES:
                continue
            for what, applied in _changes(op, combines):
                found.append(Mutant(f"{op.name}#{number} {what}", applied))
    return found


def _operations(op: ir.Operation) -> Iterator[ir.Operation]:
    """The operations of the threads, those without use and the prologue's aside."""
    for region in op.regions:
        for block in region.blocks:
            for view in list(block.operations):
                inner = view.operation
                yield from _operations(inner)
                if op.name == "func.func" or op.name == "builtin.module":
                    continue
                used = not inner.results or any(list(r.uses) for r in inner.results)
                if used:
                    yield inner


def _changes(op: ir.Operation, combines: bool) -> Iterator[tuple[str, Callable]]:
    match op.name:
        case "arith.cmpi" | "arith.cmpf":
            own = ir.IntegerAttr(op.attributes["predicate"]).value
            table = _CMPI if op.name == "arith.cmpi" else _CMPF
            for other in table.get(own, ()):
                yield f"{own} to {other}", _attribute(op, "predicate", _i64(other))
        case "arith.select":
            yield "swapped", _operands(op, [0, 2, 1])
        case "nvvm.shfl.sync":
            yield from _shuffles(op, combines)
        case "nvvm.redux.sync" | "nvvm.vote.sync":
            yield from _of_warps(op)
        case "llvm.call_intrinsic":
            yield from _intrinsics(op)
        case "nvvm.ldmatrix" | "nvvm.stmatrix":
            yield from _matrices(op)
        case "vector.extract":
            yield from _extracts(op)
        case "arith.constant":
            yield from _constants(op)
        case name if name in _OTHER and _on_elements(op):
            for other in _OTHER[name]:
                yield other, _renamed(op, other)


def _on_elements(op: ir.Operation) -> bool:
    """Whether an operation works on elements of arrays, not on addresses."""
    return isinstance(op.results[0].type, ir.VectorType) or op.name.startswith("math.")


def _shuffles(op: ir.Operation, combines: bool) -> Iterator[tuple[str, Callable]]:
    by_number = "idx" in str(op.attributes["kind"])
    if by_number and _is_constant(op.operands[2]):
        return  # the warp's number, which all of its lanes hold
    if combines:
        mask = op.operands[2].owner.attributes["value"].value
        yield "of the own lane", _xored(op, 2, mask)
    else:
        for distance in (1, 2, 16):
            yield f"of the lane ^ {distance}", _xored(op, 2, distance)
    if not by_number:
        idx = ir.Attribute.parse("#nvvm.shfl_kind<idx>")
        yield "by number", _attribute(op, "kind", idx)


def _of_warps(op: ir.Operation) -> Iterator[tuple[str, Callable]]:
    attribute = str(op.attributes["kind"])
    own = re.split(r"[< >]+", attribute)[1]
    for kinds in (
        ("any", "all"),
        ("fmin", "fmax"),
        ("add", "and", "or", "xor", "max", "min", "umax", "umin"),
    ):
        for other in set(kinds) - {own} if own in kinds else ():
            new = ir.Attribute.parse(attribute.replace(own, other))
            yield f"{own} to {other}", _attribute(op, "kind", new)


def _intrinsics(op: ir.Operation) -> Iterator[tuple[str, Callable]]:
    name = ir.StringAttr(op.attributes["intrin"]).value
    if "prmt" in name:
        for nibble in (0, 4):
            yield f"byte {nibble // 4}", _xored(op, 2, 1 << nibble)
    if name.endswith(".rz"):
        head, tail = name.rsplit("2", 1)
        other = tail[1:] if tail.startswith("u") else f"u{tail}"
        text = ir.StringAttr.get(f"{head}2{other}")
        yield "other sign", _attribute(op, "intrin", text)


def _matrices(op: ir.Operation) -> Iterator[tuple[str, Callable]]:
    old = str(op.attributes["layout"])
    new = old.replace("row", "col") if "row" in old else old.replace("col", "row")
    # Matrices of 8-bit elements are always transposed.
    if "b16" in str(op.attributes["eltType"]):
        yield "transposed", _attribute(op, "layout", ir.Attribute.parse(new))
    if op.name == "nvvm.stmatrix" and len(op.operands) > 2:
        rest = range(3, len(op.operands))
        yield "other matrix first", _operands(op, [0, 2, 1, *rest])


def _extracts(op: ir.Operation) -> Iterator[tuple[str, Callable]]:
    (lane,) = ir.DenseI64ArrayAttr(op.attributes["static_position"])
    count = op.operands[0].type.shape[0]
    if count > 1:
        other = ir.DenseI64ArrayAttr.get([(lane + 1) % count])
        yield "the next element", _attribute(op, "static_position", other)


def _constants(op: ir.Operation) -> Iterator[tuple[str, Callable]]:
    if not isinstance(op.results[0].type, ir.VectorType):
        return  # of addresses
    value = ir.DenseElementsAttr(op.attributes["value"])
    type_ = op.results[0].type
    element = value.get_splat_value()
    if isinstance(element, ir.FloatAttr):
        changed: ir.Attribute = ir.FloatAttr.get(element.type, element.value + 1.0)
        if changed == element:
            changed = ir.FloatAttr.get(element.type, 1.0)
    else:
        changed = ir.IntegerAttr.get(element.type, (int(element.value) ^ 1) & 1)
    new = ir.DenseElementsAttr.get_splat(type_, changed)
    yield f"{element} to {changed}", _attribute(op, "value", new)


# --- changes in place -----------------------------------------------------------------


def _i64(value: int) -> ir.Attribute:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def _is_constant(value: ir.Value) -> bool:
    owner = value.owner
    return not isinstance(owner, ir.Block) and owner.name == "arith.constant"


def _attribute(op: ir.Operation, name: str, value: ir.Attribute) -> Callable:
    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        old = op.attributes[name]
        op.attributes[name] = value
        try:
            yield
        finally:
            op.attributes[name] = old

    return applied


def _operands(op: ir.Operation, order: list[int]) -> Callable:
    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        old = list(op.operands)
        _set(op, [old[i] for i in order])
        try:
            yield
        finally:
            _set(op, old)

    return applied


def _set(op: ir.Operation, values: list[ir.Value]) -> None:
    for i, value in enumerate(values):
        op.operands[i] = value


def _xored(op: ir.Operation, i: int, bits: int) -> Callable:
    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        old = op.operands[i]
        with op.context, ir.Location.unknown(), ir.InsertionPoint(op):
            constant = arith.constant(old.type, bits)
            changed = arith.xori(old, constant)
        op.operands[i] = changed
        try:
            yield
        finally:
            op.operands[i] = old
            changed.owner.erase()
            constant.owner.erase()

    return applied


def _renamed(op: ir.Operation, name: str) -> Callable:
    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        with op.context, ir.Location.unknown(), ir.InsertionPoint(op):
            other = ir.Operation.create(name, [op.results[0].type], list(op.operands))
        op.results[0].replace_all_uses_with(other.results[0])
        try:
            yield
        finally:
            other.results[0].replace_all_uses_with(op.results[0])
            other.erase()

    return applied
