# SPDX-License-Identifier: Apache-2.0
"""A wrong emitter in the elementwise table gives wrong numbers in `test_programs.py`.

A mutant replaces a row's emitter by another row's, by one that computes nothing, or a
conversion by a neighbouring one. Mutants that are the same function are listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest
from jaxlib.mlir.dialects import arith, math

from pallas_gpu.emitters.elements import dtypes, table
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.emitters.elements.row import NARROW_FLOATS, Case, Row
from tests.support import element_programs as elements
from tests.support import movement_programs as movements
from tests.support.programs import Program

# (row, kind of dtype): the mutants that are the same function there.
_OR, _AND = ("add", "max", "or"), ("mul", "min", "and")
_NUMBERS = ("float", "float8", "signed", "unsigned")
EQUIVALENT: dict[tuple[str, str], set[str]] = {
    # Of bools a sum is a disjunction and a product a conjunction.
    **{(name, "bool"): set(_OR) - {name} for name in _OR},
    **{(name, "bool"): set(_AND) - {name} for name in _AND},
    # The sum of two contributions to a derivative.
    **{("add", kind): {"add_any"} for kind in _NUMBERS},
    **{("add_any", kind): {"add"} for kind in _NUMBERS},
    # An unsigned integer is its absolute value.
    ("abs", "unsigned"): {"nothing"},
    # To the integer of the other sign.
    ("bitcast_convert_type", "signed"): {"convert"},
}


def replaced(row: Row, field: str, mutant: Case) -> Callable:
    """A context in which the table has another case."""
    changed = dataclasses.replace(row, **{field: mutant})
    return lambda: mock.patch.dict(table.TABLE, {row.name: changed})


def survivors(program: Program, mutants: dict[str, Callable]) -> set[str]:
    """The names of the contexts in which the program's results are those expected."""
    right = program.variants(list(mutants.values()))
    return {name for name, is_right in zip(mutants, right, strict=True) if is_right}


def emitters(row: Row, kind: dtypes.Kind) -> Iterator[tuple[str, Callable]]:
    """Wrong emitters of the same operands and type of result, by name."""

    def nothing(dtype, *values, **_):
        if row.result == "bool":
            return dtypes.constant(False, dtypes.BOOL, values[0])
        return values[row.typed_by]

    if row.result == "any":
        yield "convert", table.TABLE["convert_element_type"].cases[kind].emit
        return
    yield "nothing", nothing
    for other in table.TABLE.values():
        case = other.cases[kind]
        same = other.result == row.result and other.typed_by == row.typed_by
        same &= elements.arity(other.name) == elements.arity(row.name)
        if case is None or other is row or not same or row.typed_by:
            continue
        params = elements.PARAMS.get(other.name, ({},))[0]
        yield (
            other.name,
            lambda dtype, *x, c=case, p=params, **_: c.emit(dtype, *x, **p),
        )
    if row.name == "clamp":
        minimum, maximum = (table.TABLE[name].cases[kind] for name in ("min", "max"))
        yield "low", lambda dtype, low, x, high: maximum.emit(dtype, x, low)
        yield "high", lambda dtype, low, x, high: minimum.emit(dtype, x, high)
    if row.name == "select_n":
        select = row.cases[kind].emit
        yield "other case", lambda dtype, which, a, b: select(dtype, which, b, a)


def field_of(row: Row, kind: dtypes.Kind) -> str:
    """The field with the case of a kind of dtype."""
    if kind in NARROW_FLOATS:
        return "floating" if row.narrow_float is None else "narrow_float"
    return {"float": "floating", "bool": "boolean"}.get(kind, kind)


@pytest.mark.parametrize("name", elements.rows())
def test_a_wrong_emitter_is_noticed(name):
    row = table.TABLE[name]
    # The rows of float4 and of most exponents are those of float8.
    kinds = set(row.kinds) - {
        "float4",
        *(("exponent",) if not row.narrow_float else ()),
    }
    for kind in kinds:
        mutants = {
            label: replaced(row, field_of(row, kind), Case(emit))
            for label, emit in emitters(row, kind)
        }
        programs = elements.row_programs(name, kind, elements.DTYPES[kind][0])
        found = set.intersection(*(survivors(p, mutants) for p in programs))
        assert found == EQUIVALENT.get((name, kind), set()), kind


def test_a_wrong_approximation_is_noticed():
    programs = elements.approximations()
    for name, program in programs.items():
        others = {
            other: replaced(table.TABLE[name], "approx", table.TABLE[other].approx)
            for other in programs.keys() - {name}
        }
        assert not survivors(program, others), name


@pytest.mark.parametrize("name", movements.combinations())
def test_a_wrong_combination_is_noticed(name):
    """Each kind of reduction and scan, as if it were another one."""
    row = table.lookup(movements.kind_of(name))
    for other in ("add", "mul", "max", "min", "and", "or"):
        if other == row.name or _combines_otherwise(name, row.name, other):
            continue
        program = movements.combinations()[name]
        with mock.patch.dict(table.TABLE, {row.name: table.TABLE[other]}):
            results = program.results(program.module())
        assert not program.is_right(results), other


def _combines_otherwise(name: str, kind: str, other: str) -> bool:
    """Whether a row does not exist for the dtype; or is the same function on its data.

    Reductions of bools are those of bytes that are 0 or 1.
    """
    if "float" in name or "halves" in name or kind == "logaddexp":
        return other in ("and", "or")
    bools = [{"or", "max", "add"}, {"and", "min", "mul"}]
    return "bool" in name and any({kind, other} <= same for same in bools)


# --- conversions ----------------------------------------------------------------------


def _with_sign(dtype: np.dtype) -> np.dtype:
    """The integer of the same width and the other sign."""
    other = {"i": "u", "u": "i"}[dtype.kind]
    return np.dtype(f"{other}{dtype.itemsize}")


def conversions(src: np.dtype, dst: np.dtype) -> Iterator[tuple[str, Callable]]:
    """Wrong conversions: other signs, widths, roundings and formats."""
    a, b = dtypes.kind(src), dtypes.kind(dst)
    bits, wide = dtypes.bits(src), dtypes.bits(dst)
    from_int, to_int = a in ("signed", "unsigned"), b in ("signed", "unsigned")
    if from_int and (b == "float" or (to_int and wide > bits)):
        yield "sign of the source", lambda x: convert_value(x, _with_sign(src), dst)
    if a == "float" and to_int:
        yield "sign of the result", lambda x: convert_value(x, src, _with_sign(dst))
        yield "rounded", lambda x: convert_value(math.roundeven(x), src, dst)
    if a in ("float", "signed", "unsigned") and b in ("float", "signed", "unsigned"):
        yield "width", lambda x: _through_less(x, src, dst)
    if b == "bool":
        low = np.dtype(np.int8)
        yield "of the low bits", lambda x: _low_bit(convert_value(x, src, low))
    if a == "bool":
        yield (
            "minus one",
            lambda x: convert_value(
                emit_resized(arith.extsi, x, np.dtype(np.int8)), np.dtype(np.int8), dst
            ),
        )
    if a == "exponent":
        yield "as float8_e5m2", lambda x: convert_value(x, dtypes.F8_E5M2, dst)
        yield "as its bits", lambda x: convert_value(x, dtypes.U8, dst)
    elif "float8" in (a, b) and b != "bool":
        formats = {dtypes.F8_E4M3: dtypes.F8_E5M2, dtypes.F8_E5M2: dtypes.F8_E4M3}
        if a == b:
            yield "not at all", lambda x: x
        elif a == "float8":
            yield "format", lambda x: convert_value(x, formats[src], dst)
        else:
            yield "format", lambda x: convert_value(x, src, formats[dst])


def _through_less(x, src: np.dtype, dst: np.dtype):
    """A conversion by way of a type that holds less than both."""
    least = min(dtypes.bits(src), dtypes.bits(dst))
    if dtypes.kind(src) == "float" and dtypes.kind(dst) == "float":
        less = dtypes.F8_E4M3
        return convert_value(convert_value(x, src, less), less, dst)
    sign = "u" if "unsigned" in (dtypes.kind(src), dtypes.kind(dst)) else "i"
    if least == 8:
        # No narrower type: the lowest bit is lost.
        small = convert_value(x, src, np.dtype(np.int8))
        even = arith.andi(small, dtypes.constant(-2, np.dtype(np.int8), small))
        return convert_value(even, np.dtype(np.int8), dst)
    less = np.dtype(f"{sign}{least // 16}")
    return convert_value(convert_value(x, src, less), less, dst)


def emit_resized(op: Callable, x, dst: np.dtype):
    """Emits a conversion operation to a dtype."""
    lanes = dtypes.length(x)
    type_ = dtypes.mlir_type(dst)
    return op(type_ if lanes is None else dtypes.vector_type(dst, lanes), x)


def _low_bit(x):
    return emit_resized(arith.trunci, x, dtypes.BOOL)


def mutated_conversion(
    source: np.dtype, target: np.dtype, convert: Callable
) -> Callable:
    """A context in which another conversion replaces one of the table."""
    row = table.TABLE["convert_element_type"]

    def emit(dtype, x, to):
        chosen = (dtype, to) == (source, target)
        return convert(x) if chosen else convert_value(x, dtype, to)

    return replaced(row, field_of(row, dtypes.kind(source)), Case(emit))


@pytest.mark.parametrize("src", elements.SOURCES)
def test_a_wrong_conversion_is_noticed(src):
    for dst in elements.mutated_conversions(src):
        pair = np.dtype(src), np.dtype(dst)
        mutants = {
            label: mutated_conversion(*pair, convert)
            for label, convert in conversions(*pair)
        }
        assert mutants
        assert not survivors(elements.conversion_program(src, dst), mutants), dst
