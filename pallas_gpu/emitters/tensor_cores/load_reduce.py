# SPDX-License-Identifier: Apache-2.0
"""Extrema of a row that the load from TMEM itself gives. PTX: `tcgen05.ld.red`.

A reduction looks for the loads of its operands, which are emitted by then, and replaces
each of them by one that also gives the largest or the least of what it loads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_gpu.emitters import module, operations
from pallas_gpu.emitters.elements import dtypes, words

_TYPES = {dtypes.F32: "NaN.f32", dtypes.I32: "s32", dtypes.U32: "u32"}
# Of this shape each thread loads columns of one row.
_LOAD = "tcgen05.ld.sync.aligned.32x32b"


def extrema(
    kind: str, values: Sequence[ir.Value], dtype: np.dtype
) -> list[ir.Value] | None:
    """Single elements, whose extremum is that of the values; None without the loads.

    PTX: `tcgen05.ld.red.sync.aligned`, in place of `tcgen05.ld`. Since: sm_103a.

    Args:
      kind: `max` or `min`, which propagate NaN.
      values: registers of a thread; their absolute values are looked through.
      dtype: of their elements.
    """
    if kind not in ("max", "min") or dtype not in _TYPES or not _has_instruction():
        return None
    origins = [_origin(v, i) for v in values for i in range(dtypes.length(v) or 1)]
    loads = _loads_of([element for element, _ in origins])
    absolute = {sign for _, sign in origins}
    if loads is None or len(absolute) > 1:
        return None
    modifier = f"{kind}{'.abs' if True in absolute else ''}.{_TYPES[dtype]}"
    return [_reducing(load, modifier) for load in loads]


def _has_instruction() -> bool:
    """PTX ISA, tcgen05.ld.red: sm_103f and higher of its family, sm_110f."""
    major, minor = module.current().spec.arch
    return (major == 10 and minor >= 3) or major == 11


def _origin(value: ir.Value, lane: int) -> tuple[ir.Value, bool]:
    """Where an element of a register comes from, and if its absolute value is taken."""
    absolute = False
    while not isinstance(value.owner, ir.Block):
        made = value.owner.operation
        match made.name:
            case "math.absf":
                value, absolute = made.operands[0], True
            case "vector.from_elements":
                value = made.operands[lane]
            case "vector.extract" if len(made.operands) == 1:
                (lane,) = ir.DenseI64ArrayAttr(made.attributes["static_position"])
                value = made.operands[0]
            case _:
                break
    return value, absolute


def _made_by(value: ir.Value, name: str) -> bool:
    return not isinstance(value.owner, ir.Block) and value.owner.name == name


def _loads_of(elements: Sequence[ir.Value]) -> list[ir.Operation] | None:
    """The loads of which the elements are all results, each of them once."""
    found: dict[ir.Operation, set[int]] = {}
    for element in elements:
        if not _made_by(element, "llvm.extractvalue"):
            return None
        (place,) = ir.DenseI64ArrayAttr(element.owner.attributes["position"])
        source = element.owner.operands[0]
        if not _made_by(source, "llvm.inline_asm"):
            return None
        found.setdefault(source.owner.operation, set()).add(place)
    whole = sum(map(len, found.values())) == len(elements)
    for load, places in found.items():
        whole = whole and _text(load).startswith(_LOAD) and _count(load) == len(places)
    return list(found) if whole else None


def _text(load: ir.Operation) -> str:
    return ir.StringAttr(load.attributes["asm_string"]).value


def _count(load: ir.Operation) -> int:
    return len(llvm.StructType(load.results[0].type).body)


def _reducing(load: ir.Operation, modifier: str) -> ir.Value:
    """Replaces a load; returns the extremum of what it loads."""
    types = list(llvm.StructType(load.results[0].type).body)
    count = len(types)
    names = ", ".join(f"${i}" for i in range(count))
    form = _LOAD.replace(".ld.", ".ld.red.")
    with ir.InsertionPoint(load), load.location:
        letters = words.constraints_of([*types, types[0]])
        result = operations.inline_assembly(
            llvm.StructType.get_literal([*types, types[0]]),
            list(load.operands),
            f"{form}.x{count}.{modifier} {{{names}}}, ${count}, [${count + 1}];",
            ",".join([*(f"={x}" for x in letters), "r", "~{memory}"]),
            volatile=True,
        )
        extremum = dtypes.fields(result, [*types, types[0]])[-1]
    load.results[0].replace_all_uses_with(result)
    load.erase()
    return extremum
