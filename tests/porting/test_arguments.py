# SPDX-License-Identifier: Apache-2.0
"""Names in common with upstream have its arguments, but for those with a reason."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu, triton

import pallas_gpu as plgpu
from tests.support.every import every
from tools.porting_arguments import ARGUMENTS, Change
from tools.porting_names import PL, PLGPU

on_0_11 = pytest.mark.skipif(
    not jax.__version__.startswith("0.11."), reason="the rows are those of jax 0.11"
)
# What is not called. `TMEMLayout` is an enumeration upstream, whose members are named.
NOT_CALLED = {"MemorySpace", "TMEMLayout", "BlockDim", "no_block_spec", "squeezed"}
MODULES = {
    name: module
    for module, rows in ((pl, PL), (mosaic_gpu, PLGPU))
    for name in rows
    if name in plgpu.__all__ and name not in NOT_CALLED and hasattr(module, name)
}
# Of names that upstream gives up.
old_names = pytest.mark.filterwarnings("ignore::DeprecationWarning")
_Parameters = Mapping[str, inspect.Parameter]


def parameters(function: Any) -> _Parameters:
    """The parameters that users pass, by name; those of any number by their kind."""
    if isinstance(function, enum.Enum):
        function = function.__call__
    found = inspect.signature(function).parameters.values()
    rest = inspect.Parameter.VAR_POSITIONAL
    named = {"*args" if p.kind is rest else p.name: p for p in found}
    return {name: p for name, p in named.items() if not name.startswith("_")}


def is_nothing(default: Any) -> bool:
    """Whether a default stands for what is not given."""
    kind = type(default).__name__
    return (
        default is None
        or default == ()
        or default == {}
        or "NotSpecified" in kind
        or kind in ("NoBlockSpec", "object")
    )


def agree(theirs: inspect.Parameter, ours: inspect.Parameter) -> bool:
    """Whether two parameters have the same default."""
    a, b = theirs.default, ours.default
    if is_nothing(a) and is_nothing(b):
        return True
    if isinstance(a, enum.Enum) and isinstance(b, enum.Enum):
        return a.name == b.name
    return type(a) is type(b) and bool(a == b)


def changes(theirs: _Parameters, ours: _Parameters) -> dict[str, Change]:
    """How arguments differ."""
    found = dict.fromkeys(theirs.keys() - ours.keys(), Change.NOT_TAKEN)
    found |= dict.fromkeys(ours.keys() - theirs.keys(), Change.NEW)
    for name in theirs.keys() & ours.keys():
        if not agree(theirs[name], ours[name]):
            found[name] = Change.DEFAULT
    return found


def positional(given: _Parameters) -> list[str]:
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return [name for name, p in given.items() if p.kind not in by_name]


@on_0_11
@old_names
@every(MODULES.items())
def test_each_argument_that_differs_has_a_reason(name, module):
    theirs, ours = (parameters(getattr(m, name)) for m in (module, plgpu))
    reasons = {n: change for n, (change, _) in ARGUMENTS.get(name, {}).items()}
    assert changes(theirs, ours) == reasons


@on_0_11
@old_names
@every(MODULES.items())
def test_positions_are_those_of_upstream(name, module):
    theirs, ours = (positional(parameters(getattr(m, name))) for m in (module, plgpu))
    assert ours[: len(theirs)] == theirs


@on_0_11
@every(plgpu.triton.__all__)
def test_arguments_of_the_names_of_triton_are_upstreams(name):
    theirs, ours = (parameters(getattr(m, name)) for m in (triton, plgpu.triton))
    assert positional(ours)[: len(theirs)] == positional(theirs)
    assert set(changes(theirs, ours).values()) <= {Change.NEW}


@on_0_11
@every(name for name in PLGPU if name in plgpu.__all__)
def test_members_of_enumerations_are_those_of_upstream(name):
    members = getattr(getattr(mosaic_gpu, name, None), "__members__", {})
    ours = getattr(plgpu, name)
    assert not [m for m in members if m[0] != "_" and not hasattr(ours, m)]


@on_0_11
def test_reasons_are_given_for_names_in_common():
    assert not ARGUMENTS.keys() - MODULES.keys()
