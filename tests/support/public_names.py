# SPDX-License-Identifier: Apache-2.0
"""The public callables of the package, found by walking it, and how one is called.

A name that is added to `__all__` is found here without an edit.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pallas_gpu as plgpu
from pallas_gpu import ops
from pallas_gpu.layouts.registers import catalogue
from pallas_gpu.types import RefView

# Public callables that are not called with a user's arguments.
NOT_CALLED = {
    "MemorySpace": "an enumeration: its members are GMEM, SMEM, TMEM and REGS",
    "CopyPartition": "a base class: its members are PARTITIONED and REPLICATED",
    "Ref": "a protocol",
    "Transform": "a protocol",
    "arch.Target": "a protocol",
    "NDLoopInfo": "made by nd_loop",
    "Slice": "a class of JAX, made by ds; what indexes a reference is checked there",
    "offline.KernelReport": "made by offline.compile",
    "offline.LoweredReport": "made by offline.lower",
    "testing.Autotuned": "made by autotune",
    "testing.Estimate": "made by testing.rank",
    "testing.PerfReport": "made by testing.perf_report",
    "testing.PerfTable": "made by testing.perf_report",
    "testing.TunedConfig": "made by autotune",
    "testing.TunedConfig.of": "made by autotune",
    "testing.TuningReport": "made by autotune",
    "testing.TuningReport.from_json": "made by autotune",
    "ops.collectives.Dispatched": "made by ops.collectives.dispatch",
    "offline.Resources": "made by offline.compile",
    "arch.GpuTarget": "hardware; arch.TARGETS contains them",
    "layouts.Drawing": "made by draw",
    "layouts.LinearLayout": "made by the layouts' method linear",
    "layouts.LinearLayout.create": "made by the layouts' method linear",
    "layouts.LinearLayout.from_coordinates": "made by the layouts' method linear",
}
# Exceptions are caught, not made; the other one is a name of layouts.TmemLayout.
NOT_WALKED = ("errors", "TMEMLayout")
# Methods that users call on values; those of references are walked.
METHODS = (
    "TiledLayout.reduce", "TiledLayout.linear", "TiledLayout.draw", "Tiling.tile_shape",
)  # fmt: skip


def public_callables() -> dict[str, Callable[..., Any]]:
    """Every public function, constructor and declaration, by its dotted name."""
    found: dict[str, Callable[..., Any]] = {}
    public = sorted(set(plgpu.__all__) - set(NOT_WALKED))
    # A name of the package itself goes before the same one of a module.
    for name in sorted(public, key=lambda n: inspect.ismodule(getattr(plgpu, n))):
        _enter(found, name, getattr(plgpu, name))
    _enter(found, "ops", ops)
    for name in METHODS:
        owner, method = name.split(".")
        found[name] = getattr(getattr(plgpu, owner), method)
    return {name: fn for name, fn in found.items() if name not in NOT_CALLED}


def _enter(found: dict[str, Callable[..., Any]], name: str, value: Any) -> None:
    if inspect.ismodule(value):
        for inner in getattr(value, "__all__", ()):
            if inner not in plgpu.__all__:
                _enter(found, f"{name}.{inner}", getattr(value, inner))
    elif inspect.isclass(value) and issubclass(value, enum.Enum):
        for member in value:
            if callable(member):
                _enter_member(found, f"{name}.{member.name}", member)
    elif callable(value):
        found[name] = value
        if inspect.isclass(value) and not value.__module__.startswith("jax."):
            _enter_constructors(found, name, value)


def _enter_constructors(found: dict[str, Any], name: str, cls: type) -> None:
    for attribute, value in vars(cls).items():
        if isinstance(value, staticmethod | classmethod) and attribute[0] != "_":
            found[f"{name}.{attribute}"] = getattr(cls, attribute)


def _enter_member(found: dict[str, Any], name: str, member: Any) -> None:
    """A layout with parameters is called as the function that makes it."""
    if not isinstance(member, plgpu.Layout):
        found[name] = member.__call__
        return
    maker = catalogue.definitions()[member.name]
    if callable(maker) and not isinstance(maker, type):
        found[name] = functools.wraps(maker)(lambda *a, **kw: member(*a, **kw))


def reference_methods() -> set[str]:
    """The public methods and properties of references, ours and inherited."""
    own = {name for name in dir(RefView) if name[0] != "_"}
    return {name for name in own if callable(getattr(RefView, name))}


@functools.cache
def parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a callable, by name."""
    return inspect.signature(fn).parameters


def call(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Calls a function with arguments by the names of its parameters.

    An argument for `*rest` is a tuple, one for `**options` a dict.
    """
    positional: list[Any] = []
    named: dict[str, Any] = {}
    spread = inspect.Parameter.VAR_POSITIONAL in {
        p.kind for p in parameters(fn).values()
    }
    for name, parameter in parameters(fn).items():
        if name not in arguments:
            continue
        value = arguments[name]
        match parameter.kind:
            case inspect.Parameter.VAR_POSITIONAL:
                positional.extend(value)
            case inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            case inspect.Parameter.POSITIONAL_ONLY:
                positional.append(value)
            case inspect.Parameter.POSITIONAL_OR_KEYWORD if spread:
                positional.append(value)
            case _:
                named[name] = value
    return fn(*positional, **named)
