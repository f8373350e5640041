# SPDX-License-Identifier: Apache-2.0
"""Reads, writes and operands of references: bounds, single elements, layouts."""

from __future__ import annotations

from typing import Any

import pallas_gpu.layouts as layouts
from pallas_gpu import _jax, errors, types
from pallas_gpu.entry.check import tmem, wgmma
from pallas_gpu.layouts.window import Window
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.registers import load_p
from pallas_gpu.primitives.tensor_cores.tmem import (
    async_load_tmem_p,
    async_store_tmem_p,
)
from pallas_gpu.program.build import region_of, variables_of
from pallas_gpu.program.nodes import Access, Op
from pallas_gpu.program.walk import Site, walk


def check_operands(op: Op, mesh: types.Mesh) -> None:
    """Checks the references among the operands of an operation of ours."""
    for access in op.accesses:
        window = window_in_bounds(access, op.name)
        if isinstance(access.buffer.aval, types.AccumulatorRef):
            stored = op.primitive in (_jax.swap_p, _jax.addupdate_p)
            wgmma.check_part(window, stored=stored)
        if access.space is types.TMEM:
            tmem.check_part(access.buffer.aval, window)


@registry.checks(async_load_tmem_p, async_store_tmem_p)
def _check_transfer(op: Op, mesh: types.Mesh) -> None:
    check_operands(op, mesh)
    for access in op.accesses:
        layout = op.params.get("layout")
        tmem.check_transfer(access.buffer.aval, access.window, layout)


@registry.checks(load_p, _jax.get_p, _jax.swap_p, _jax.addupdate_p)
def _check_access(op: Op, mesh: types.Mesh) -> None:
    check_operands(op, mesh)
    for access in op.accesses:
        if access.space is types.TMEM:
            tmem.check_transfer(access.buffer.aval, access.window, None)
        else:
            _check_layout(access.buffer.aval, access.window, op.params.get("layout"))


def _check_layout(aval: Any, window: Window, layout: Any) -> None:
    """Raises LayoutError unless the loaded or stored array has a register layout."""
    if window.shape == () or isinstance(aval, types.AccumulatorRef):
        return
    if layout is not None:
        description = layouts.to_layout(layout)
        # A strided layout that is not linear in coordinates still covers each element.
        if not isinstance(description, layouts.WGStridedLayout):
            description.linear(window.shape)
        return
    tiled = any(isinstance(t, types.TilingTransform) for t in aval.transforms)
    if tiled and len(window.shape) == 2 and window.shape[0] % types.WGMMA_ROWS == 0:
        return
    layouts.default_layout(window.shape, types.itemsize_bits(aval.dtype))


def check_inputs(jaxpr: _jax.Jaxpr, inputs: int) -> None:
    """Raises KernelError for an access that writes an input of the kernel.

    JAX's arrays are immutable, and other operations may use them.

    Args:
      jaxpr: the kernel's body.
      inputs: how many of its references are inputs; the first ones.
    """
    arrays = region_of(jaxpr).inputs[:inputs]
    for origin, (access, site) in _writes(jaxpr).items():
        if origin in arrays:
            aval = types.describe(access.buffer.aval)
            raise errors.KernelError(
                f"input {origin.index} ({aval}) is written, but it is an input",
                expected="stores to outputs of the kernel and to scratch memory",
                got=f"{words(site.op.name)} of an input",
                hint="declare a result for it, and write that; or pass a "
                "jax.new_ref(array), which kernels update in place",
                where=site.where,
            )


def check_semaphores(jaxpr: _jax.Jaxpr) -> None:
    """Raises KernelError for an array that is accessed as semaphores and otherwise.

    Semaphores order accesses; nothing orders their own with those of an array.
    """
    found: dict[Any, dict[bool, tuple[Access, Site]]] = {}
    for site in walk(jaxpr):
        for access in site.op.accesses:
            if access.space is types.GMEM:
                kinds = found.setdefault(site.origin(access.buffer), {})
                signals = access.operation.family == "semaphore"
                kinds.setdefault(signals, (access, site))
    for kinds in found.values():
        if len(kinds) == 1:
            continue
        (_, at), (other, site) = kinds[True], kinds[False]
        raise errors.KernelError(
            f"{types.describe(other.buffer.aval)} has semaphores, and is accessed as "
            "an array",
            expected="semaphore_signal, semaphore_wait and semaphore_read alone",
            got=f"{words(site.op.name)} of it, and {at.op.name}"
            + (f" at {at.where}" if at.where is not None else ""),
            hint="pass the array apart from the semaphores, plgpu.alloc_semaphore()",
            where=site.where,
        )


def written(jaxpr: _jax.Jaxpr) -> set[Any]:
    """Returns the references that a body writes, as variables of its jaxpr."""
    pairs = zip(variables_of(jaxpr), region_of(jaxpr).inputs, strict=True)
    found = _writes(jaxpr)
    return {var for var, value in pairs if value in found}


def _writes(jaxpr: _jax.Jaxpr) -> dict[Any, tuple[Access, Site]]:
    """Returns the first access that writes a reference, with its operation."""
    found: dict[Any, tuple[Access, Site]] = {}
    for site in walk(jaxpr):
        for access in site.op.accesses:
            if access.writes:
                found.setdefault(site.origin(access.buffer), (access, site))
    return found


def window_in_bounds(access: Access, name: str) -> Window:
    """Returns the part; each step to it must be in bounds of its operand."""
    steps = access.transforms
    if len(steps) < 2:
        windows = [access.window]
    else:
        windows, shape = [], access.buffer.shape
        for step in steps:
            windows.append(types.resolve(shape, (step,)))
            shape = windows[-1].shape
    for window in windows:
        bad = window.over_the_edge()
        if bad:
            raise _out_of_bounds(window, bad[0], name)
    return access.window


def _out_of_bounds(window: Window, axis: int, name: str) -> errors.OutOfBoundsError:
    start, size, shape = window.starts[axis], window.sizes[axis], window.array_shape
    n = shape[axis]
    if axis not in window.axes:
        expected = f"0 to {n - 1} in dimension {axis} of {shape}"
        got = f"index {start}"
    else:
        expected = f"a range within 0 to {n} in dimension {axis} of shape {shape}"
        known = isinstance(start, int)
        got = f"{start} to {start + size}" if known else f"a range of {size}"
    return errors.OutOfBoundsError(
        f"{words(name)} outside the reference",
        expected=expected,
        got=got,
        hint="check the index, or the declared shape of the reference",
    )


def words(name: str) -> str:
    """Returns what JAX's operations on references are called in messages."""
    return {"get": "a read", "swap": "a write", "addupdate": "an update"}.get(
        name, name
    )


def without_elements(name: str, shape: tuple[int, ...]) -> errors.ShapeError:
    """Returns the error for an operation that needs elements."""
    return errors.ShapeError(
        f"{words(name)} without elements",
        expected="arrays of one element or more",
        got=f"shape {shape}",
        hint="omit it in Python: sizes are known when the kernel is traced, "
        "and a call whose results are all empty launches nothing",
    )
