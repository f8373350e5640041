# SPDX-License-Identifier: Apache-2.0
"""A wrong operation in an emitted module gives wrong numbers in `test_programs.py`.

Comparisons with other predicates, selects of the other value, shuffles from other
lanes, permutations of other bytes, transposed matrices, other constants. What LLVM
leaves undefined counts as noticed. Mutants that are no mistakes are listed.
"""

from __future__ import annotations

import re
import warnings

import pytest

from tests.support import element_programs as elements
from tests.support import movement_programs as movements
from tests.support.mutants import mutants
from tests.support.programs import Program

# A dtype of each kind, and narrow integers; their emitters are those of the others.
# Float8 is float32 between conversions.
OF_ROWS = ("float32", "int32", "int8", "uint32", "bool")
# The combining operation does not change what is exchanged.
COMBINATIONS = (
    *("add of int32", "rows", "rows of halves", "everything"),
    *("scan by add", "scan back", "scan of rows"),
)
# Names of operations that raise what LLVM leaves undefined; see lockstep's elements.
_UNDEFINED = "arith.(div|rem|sh).*(by zero|overflows|by the width or more)"

_NEVER_BOTH = {"arith.ori#0 arith.xori"}  # a divisor is not both 0 and -1
_BOTH_NEGATED = {"arith.constant#4 0 : i8 to 1 : i8"}  # a ^ b is ~a ^ ~b
_OF_COPIES = {"arith.cmpi#0 0 to 1"}  # which of equal copies is stored
# All float8 is below 2**31, and what is clamped is not negative.
_SMALL = {"arith.minsi#0 arith.minui", "llvm.call_intrinsic#1 other sign"}
# The least scale, 2**-127, is zero in narrower types.
_LEAST = {
    "arith.constant#5 4194304 : i32 to 1 : i32",
    "arith.constant#6 0 : i32 to 1 : i32",
}


def _of_limits(*changes: str) -> set[str]:
    """Changes of the comparison of both elements of a pair with float8's limit."""
    return {f"arith.cmpf#{i} {change}" for change in changes for i in (0, 1)}


# The limits of float8: no integer is NaN, and small types have no number at the limit.
_TO_FLOAT8: dict[str, set[str]] = {
    **{
        f"{src} to float8_e4m3fn": _of_limits("2 to 9")
        for src in ("int16", "int32", "int64", "uint16", "uint32", "uint64")
    },
    **{
        f"{src} to float8_e4m3fn": _of_limits("2 to 9", "2 to 3")
        for src in ("bool", "int8", "uint8")
    },
    **{
        f"{src} to float8_e5m2": _of_limits("3 to 10")
        for src in ("int32", "int64", "uint16", "uint32", "uint64")
    },
    **{
        f"{src} to float8_e5m2": _of_limits("3 to 10", "3 to 2")
        for src in ("bool", "int8", "int16", "uint8")
    },
    # NaN with its last bit set is NaN.
    **{
        f"float64 to {dst}": _of_limits("13 to 6")
        for dst in ("float8_e4m3fn", "float8_e5m2")
    },
    # Its NaNs are at odd places.
    "float8_e4m3fn to float8_e5m2": {*_of_limits("3 to 2"), "arith.cmpf#0 3 to 10"},
    "float8_e5m2 to float8_e4m3fn": _of_limits("2 to 3"),
}
EQUIVALENT: dict[str, set[str]] = {
    **_TO_FLOAT8,
    **{f"float8_e5m2 to uint{bits}": _SMALL for bits in (8, 16)},
    **{
        f"float8_e4m3fn to uint{bits}": _SMALL | {"llvm.call_intrinsic#0 other sign"}
        for bits in (8, 16)
    },
    "float8_e8m0fnu to float16": _LEAST,
    "float8_e8m0fnu to float8_e5m2": _LEAST
    | {*_of_limits("3 to 2"), "arith.cmpf#0 3 to 10"},
    # NaN becomes 0, and so does what is less than 1.
    "float8_e8m0fnu to int32": _LEAST
    | {"arith.constant#8 2143289344 : i32 to 1 : i32"},
    **{
        f"{name}-{dtype}": _NEVER_BOTH
        for name in ("div", "rem")
        for dtype in ("int32", "int8")
    },
    **{f"{name}-bool": _BOTH_NEGATED for name in ("xor", "eq", "ne")},
    # What is clamped is not negative.
    **{
        f"{src} to {dst}": {"arith.minsi#0 arith.minui"}
        for src in ("float16", "bfloat16", "float32", "float64")
        for dst in ("uint8", "uint16")
    },
    "add of int32": _OF_COPIES | {"arith.cmpi#1 0 to 1"},
    "rows": _OF_COPIES,
    "rows of halves": _OF_COPIES,
    "everything": _OF_COPIES | {"arith.cmpi#1 0 to 1"},
    "xor of int64 in a warp": _OF_COPIES | {"arith.cmpi#1 0 to 1"},
    "relayout by copies": _OF_COPIES,
    "relayout by copies made": _OF_COPIES,
}


def survivors(program: Program, **options: bool) -> set[str]:
    """The labels of mutants whose results are those expected."""
    module = program.module()
    found = set()
    for mutant in mutants(module, **options):
        with mutant.applied(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results = program.results(module)
            except AssertionError as error:
                assert re.match(_UNDEFINED, str(error)), mutant.label
                continue
        if program.is_right(results):
            found.add(mutant.label)
    assert program.is_right(program.results(module))
    return found


@pytest.mark.parametrize("name", elements.rows())
def test_a_wrong_operation_of_a_row_is_noticed(name):
    exponents = [("exponent", "float8_e8m0fnu")] if name == "select_n" else []
    for case in elements.rows()[name]:
        if case[1] in OF_ROWS or case in exponents:
            for program in elements.row_programs(name, *case):
                expected = EQUIVALENT.get(f"{name}-{case[1]}", set())
                assert survivors(program) == expected, case


@pytest.mark.parametrize("src", elements.SOURCES)
def test_a_wrong_operation_of_a_conversion_is_noticed(src):
    for dst in elements.mutated_conversions(src):
        found = survivors(elements.conversion_program(src, dst))
        assert found == EQUIVALENT.get(f"{src} to {dst}", set()), dst


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_wrong_exchange_of_a_reduction_is_noticed(name):
    program = movements.combinations()[name]
    found = survivors(program, moves=True, combines=True)
    assert found == EQUIVALENT.get(name, set())


@pytest.mark.parametrize(
    "name", [name for name in movements.combinations() if "in a warp" in name]
)
def test_a_wrong_instruction_of_a_warp_is_noticed(name):
    program = movements.combinations()[name]
    found = survivors(program, moves="float" not in name, combines=True)
    # The largest element of a thread is often none of its first ones.
    found = {label for label in found if not label.startswith("vector.extract")}
    assert found == EQUIVALENT.get(name, _OF_COPIES)


@pytest.mark.parametrize("name", movements.movements())
def test_a_wrong_movement_is_noticed(name):
    found = survivors(movements.movements()[name], moves=True)
    assert found == EQUIVALENT.get(name, set())
