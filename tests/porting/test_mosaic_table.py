# SPDX-License-Identifier: Apache-2.0
"""docs/porting.md names everything of upstream's Mosaic level, and its arguments."""

from __future__ import annotations

import importlib
import inspect

import jax
import jax.experimental.mosaic.gpu as upstream
import pytest

from pallas_gpu import mosaic
from tests.support.every import every
from tools.porting_mosaic import MOSAIC, TCGEN05
from tools.porting_names import Status

if not jax.__version__.startswith("0.11."):
    pytest.skip("the rows are those of jax 0.11", allow_module_level=True)
HAS = (Status.SAME, Status.DIFFERS)
ROWS = [
    *((upstream, mosaic, name, row) for name, row in MOSAIC.items()),
    *((upstream.tcgen05, mosaic.tcgen05, name, row) for name, row in TCGEN05.items()),
]


def own_names(module):
    """The names that a module defines or gives to its users."""
    names = {name for name in vars(module) if not name.startswith("_")}
    if module is upstream:
        modules = {n for n in names if inspect.ismodule(getattr(module, n))}
        return names - modules | {"tcgen05", "dialect"}
    made = (name for name in names if callable(getattr(module, name)))
    name_of = module.__name__
    return {n for n in made if getattr(module, n).__module__ == name_of}


@pytest.mark.parametrize(
    ("module", "rows"), [(upstream, MOSAIC), (upstream.tcgen05, TCGEN05)]
)
def test_every_name_has_a_row(module, rows):
    assert own_names(module) == set(rows)


@every(ROWS)
def test_a_row_says_whether_we_have_the_name(_, ours, name, row):
    public = mosaic.__all__ if ours is mosaic else dir(ours)
    assert (name in public) == (row.status in HAS)
    assert bool(row.note or row.ours) == (row.status is not Status.SAME)


def _parameters(function):
    return [p for p in inspect.signature(function).parameters if p[0] != "_"]


FUNCTIONS = [
    (theirs, ours, name)
    for theirs, ours, name, row in ROWS
    if row.status in HAS and inspect.isfunction(getattr(theirs, name))
]


@every(FUNCTIONS)
def test_a_function_has_the_same_arguments(theirs, ours, name):
    assert _parameters(getattr(ours, name)) == _parameters(getattr(theirs, name))


METHODS = [
    (getattr(upstream, name), getattr(mosaic, name), method)
    for name in (
        *("FragmentedArray", "BarrierRef", "CollectiveBarrierRef", "SemaphoreRef"),
        *("WGMMAAccumulator", "Partition", "Partition1D", "DynamicSlice"),
        *("MMALayouts", "LaunchContext"),
    )
    for method in vars(getattr(upstream, name))
    if method[0] != "_" and callable(getattr(getattr(upstream, name), method))
]


@every(METHODS)
def test_a_method_is_there_with_the_same_arguments(theirs, ours, method):
    missing = {"store_tiled_async", "signal_multimem"}
    if method in missing or method.startswith("transfer_"):
        assert not hasattr(ours, method)
        return
    wanted = _parameters(getattr(theirs, method))
    if wanted[-2:] == ["args", "kwargs"]:
        return
    assert _parameters(getattr(ours, method)) == wanted


def test_modules_are_modules():
    assert inspect.ismodule(mosaic.tcgen05)
    assert mosaic.tcgen05 is importlib.import_module("pallas_gpu.mosaic.tcgen05")
