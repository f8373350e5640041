# SPDX-License-Identifier: Apache-2.0
"""Rules for arguments: what they accept, what their errors say, who must have them."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from tests.support.refusal import refused


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@expect.arguments(
    n=expect.integer(0, 8, unit="tiles"),
    colour=expect.member(Colour),
    rest=expect.names,
)
def paint(n: int, colour: Colour = Colour.RED, *rest: str) -> tuple[object, ...]:
    """Paints."""
    return n, colour, rest


def test_arguments_reach_the_function_in_their_normal_form():
    assert paint(np.int64(3), Colour.BLUE, "x") == (3, Colour.BLUE, (("x",),))
    assert type(paint(np.int64(3))[0]) is int


def test_a_checked_function_keeps_its_signature_and_docstring():
    assert list(inspect.signature(paint).parameters) == ["n", "colour", "rest"]
    assert (paint.__name__, paint.__doc__) == ("paint", "Paints.")


@pytest.mark.parametrize("n", [1.0, True, "1", None, [1], np.arange(3)])
@refused
def test_an_integer_is_static(n):
    paint(n)  # HERE


@refused
def test_an_integer_is_in_its_range():
    paint(9)  # HERE


@refused
def test_the_members_of_an_enumeration_are_listed():
    paint(1, "blue")  # HERE


Even = Annotated[int, lambda value, what: 2 * (value // 2)]


@expect.arguments()
def guess(
    flag: bool = True,
    colour: Colour | None = None,
    corner: Literal["m", "n"] = "m",
    sizes: int | Sequence[int] = (),
    axes: str | Sequence[str] | None = None,
    body: Callable[..., Any] | None = None,
    even: Even | None = None,
    config: plgpu.CompilerParams | plgpu.InterpretParams | None = None,
    free: Any = None,
    **rest: float,
) -> dict[str, object]:
    return locals()


def test_annotations_imply_rules():
    found = guess(sizes=[1, np.int64(2)], axes="x", even=3, config=None, more=2)
    assert (found["sizes"], found["axes"], found["even"]) == ((1, 2), ("x",), 2)
    assert found["rest"] == {"more": 2.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"flag": 1}, {"colour": "red"}, {"corner": "x"}, {"sizes": "1"}, {"axes": 3},
        {"body": 3}, {"config": 3}, {"more": "x"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
@refused
def test_what_an_annotation_excludes(wrong):
    guess(**wrong)  # HERE


def test_a_rule_without_a_parameter_is_our_mistake():
    with pytest.raises(errors.InternalError, match="rules without parameters"):

        @expect.arguments(a=expect.anything, b=expect.anything)
        def f(a): ...


class Unprintable:
    def __repr__(self):
        raise RuntimeError


def test_any_value_can_be_shown():
    assert expect.shown(Unprintable()) == "a Unprintable"
    assert expect.shown(np.zeros((2, 3), np.int8)) == "ndarray int8[2, 3]"
    assert len(expect.shown("x" * 1000)) == 80


def test_arguments_that_do_not_fit_the_parameters_are_named():
    @expect.arguments(
        None, "write draw(4)", n=expect.integer(0), colour=expect.anything
    )
    def draw(n, *, colour=None):
        pass

    def refused(*args, **named):
        with pytest.raises(errors.ArgumentTypeError, match="draw: the arguments") as e:
            draw(*args, **named)
        assert e.value.expected == "n, colour"
        return e.value.got, e.value.hint

    assert refused(4, 5) == ("too many positional arguments", "write draw(4)")
    assert refused() == ("missing a required argument: 'n'", "write draw(4)")
    got, hint = refused(4, color=1)
    assert got == "got an unexpected keyword argument 'color'"
    assert hint == "did you mean colour?"


def test_arguments_by_position_that_go_by_name():
    @expect.arguments(n=expect.anything)
    def draw(*, n=0):
        pass

    with pytest.raises(errors.ArgumentTypeError) as info:
        draw(4)
    assert info.value.hint == "pass n=... by name"


def test_a_type_error_of_the_function_itself_stays():
    @expect.arguments(n=expect.anything)
    def draw(n):
        return n + "text"

    with pytest.raises(TypeError, match="unsupported operand") as info:
        draw(4)
    assert not isinstance(info.value, errors.PallasGpuError)


def test_tritons_parameters_are_told_their_places():
    with pytest.raises(errors.ArgumentTypeError, match="CompilerParams") as info:
        plgpu.CompilerParams(num_warps=4)
    assert "num_threads=" in info.value.hint
    assert "test_expect.py" in info.value.where
    with pytest.raises(errors.ArgumentTypeError, match="SMEM: the arguments") as info:
        plgpu.SMEM((64, 64))
    assert info.value.got == "missing a required argument: 'dtype'"
