# SPDX-License-Identifier: Apache-2.0
"""A wrong emitter in the elementwise table gives wrong numbers in `test_programs.py`.

A mutant replaces a row's emitter by another row's, by one that computes nothing, or a
conversion by a neighbouring one. Mutants that are the same function are listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from jaxlib.mlir.dialects import arith, math

from pallas_gpu.mosaic.elements import dtypes, table
from pallas_gpu.mosaic.elements.convert import convert_value
from pallas_gpu.mosaic.elements.row import NARROW_FLOATS, Case, Row
from tests.support import element_programs as elements
from tests.support import movement_programs as movements
from tests.support.programs import Program

pytestmark = pytest.mark.sampled(4)

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
}
_FIELDS = {"float": "floating", "bool": "boolean"}


def is_noticed(program: Program) -> bool:
    """Whether a mutated program runs, and its results are wrong."""
    return not program.is_right(program.results(program.module()))


def emitters(row: Row, kind: dtypes.Kind) -> Iterator[tuple[str, Callable]]:
    """Wrong emitters of the same operands and type of result, by name."""

    def nothing(dtype, *values, **_):
        if row.result == "bool":
            return dtypes.constant(False, dtypes.BOOL, values[0])
        return values[row.typed_by]

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


def survivors(row: Row, kind: dtypes.Kind, monkeypatch) -> set[str]:
    """The names of wrong emitters that the row's programs do not notice."""
    programs = elements.row_programs()[row.name, kind, elements.SAMPLES[kind][0]]
    found = set()
    for name, emit in emitters(row, kind):
        field = _FIELDS.get(kind, kind)
        if kind in NARROW_FLOATS:
            field = "floating" if row.narrow_float is None else "narrow_float"
        mutant = dataclasses.replace(row, **{field: Case(emit)})
        with monkeypatch.context() as patched:
            patched.setitem(table.TABLE, row.name, mutant)
            if not any(map(is_noticed, programs)):
                found.add(name)
    return found


@pytest.mark.parametrize(
    ("name", "kind"), sorted({key[:2] for key in elements.row_programs()})
)
def test_a_wrong_emitter_is_noticed(name, kind, monkeypatch):
    found = survivors(table.TABLE[name], kind, monkeypatch)
    assert found == EQUIVALENT.get((name, kind), set())


@pytest.mark.parametrize("name", elements.approximations())
def test_a_wrong_approximation_is_noticed(name, monkeypatch):
    for other in elements.approximations():
        if other != name:
            wrong = table.TABLE[other].approx
            mutant = dataclasses.replace(table.TABLE[name], approx=wrong)
            with monkeypatch.context() as patched:
                patched.setitem(table.TABLE, name, mutant)
                assert is_noticed(elements.approximations()[name]), other


@pytest.mark.parametrize("name", movements.combinations())
def test_a_wrong_combination_is_noticed(name, monkeypatch):
    """Each kind of reduction and scan, as if it were another one."""
    row = table.lookup(movements.kind_of(name))
    for other in ("add", "mul", "max", "min", "and", "or"):
        if other == row.name or _combines_otherwise(name, row.name, other):
            continue
        with monkeypatch.context() as patched:
            patched.setitem(table.TABLE, row.name, table.TABLE[other])
            assert is_noticed(movements.combinations()[name]), other


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


@pytest.mark.parametrize(("src", "dst"), list(elements.conversions()))
def test_a_wrong_conversion_is_noticed(src, dst, monkeypatch):
    source, target = np.dtype(src), np.dtype(dst)
    mutants = list(conversions(source, target))
    assert mutants
    kind = dtypes.kind(source)
    row = table.TABLE["convert_element_type"]
    for label, convert in mutants:
        case = Case(
            lambda dtype, x, to, c=convert: (
                c(x) if (dtype, to) == (source, target) else convert_value(x, dtype, to)
            )
        )
        field = "narrow_float" if kind in NARROW_FLOATS else _FIELDS.get(kind, kind)
        mutant = dataclasses.replace(row, **{field: case})
        with monkeypatch.context() as patched:
            patched.setitem(table.TABLE, row.name, mutant)
            assert is_noticed(elements.conversion_program(src, dst)), label
