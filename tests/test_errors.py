# SPDX-License-Identifier: Apache-2.0
"""The form of every error: rows, locations, families, pickles."""

from __future__ import annotations

import inspect
import pickle

import jax
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.PallasGpuError)
]
RESOURCES = {"resource": "SMEM", "limit_bytes": 8, "used_bytes": 9}


def make(cls: type[errors.PallasGpuError], **rows: object) -> errors.PallasGpuError:
    extra = RESOURCES if cls is errors.OutOfResources else {}
    return cls("the mistake", **rows, **extra)


def test_rows_come_in_order_and_absent_ones_are_left_out():
    error = make(errors.ShapeError, hint="do this", expected=3, where="k.py:4 (body)")
    assert str(error).splitlines() == [
        "the mistake",
        "  expected:  3",
        "  hint:      do this",
        "  at:        k.py:4 (body)",
    ]


def test_the_text_of_the_line_is_printed_beneath_its_place(tmp_path):
    path = tmp_path / "k.py"
    path.write_text("def body(x):\n    x[9] = 0  # here\n")
    error = make(errors.ShapeError, where=f"{path}:2 (body)\nCTA (i=3)")
    assert str(error).splitlines()[1:] == [
        f"  at:        {path}:2 (body)",
        "                 x[9] = 0  # here",
        "             CTA (i=3)",
    ]


def test_the_line_of_a_kernel_is_printed():
    def body(x, o):
        o[...] = x[70]  # out of bounds

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64,), "float32"))
    with pytest.raises(errors.OutOfBoundsError) as info:
        kernel(np.zeros((64, 64), np.float32))
    assert str(info.value).splitlines()[-1].strip() == "o[...] = x[70]  # out of bounds"


def test_rows_of_several_lines_are_aligned():
    error = make(errors.ShapeError, got="a table\nof two rows")
    assert str(error).splitlines()[1:] == [
        "  got:       a table",
        "             of two rows",
    ]


def test_the_first_location_stays():
    error = make(errors.ShapeError).with_location(None).with_location("a.py:1 (f)")
    assert error.with_location("b.py:2 (g)").where == "a.py:1 (f)"


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_survives_a_pickle(cls):
    error = make(cls, expected=1, got="x", hint="h", where="a.py:1 (f)")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_belongs_to_one_family(cls):
    families = (errors.KernelError, errors.UnsupportedError, errors.InternalError)
    belongs = [family for family in families if issubclass(cls, family)]
    assert len(belongs) == (0 if cls is errors.PallasGpuError else 1)
    assert inspect.getdoc(cls)


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ShapeError, ValueError),
        (errors.KernelError, ValueError),
        (errors.DTypeError, TypeError),
        (errors.DTypeError, ValueError),
        (errors.ArgumentTypeError, TypeError),
        (errors.ArgumentTypeError, ValueError),
        (errors.MemorySpaceError, ValueError),
        (errors.OutOfBoundsError, IndexError),
        (errors.OutOfResources, ValueError),
        (errors.ClosureError, ValueError),
        (errors.AxisNameError, LookupError),
        (errors.AxisNameError, NameError),
        (errors.TargetError, NotImplementedError),
        (errors.DifferentiationError, NotImplementedError),
        (errors.DeadlockError, RuntimeError),
        (errors.NoGpuError, RuntimeError),
        (errors.NoGpuError, ValueError),
    ],
)
def test_users_of_jax_catch_the_builtin_they_expect(cls, builtin):
    with pytest.raises(builtin, match="the mistake"):
        raise make(cls)


def test_resources_are_numbers_too():
    error = make(errors.OutOfResources)
    assert (error.resource, error.limit_bytes, error.used_bytes) == ("SMEM", 8, 9)
