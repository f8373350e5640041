# SPDX-License-Identifier: Apache-2.0
"""Reads, writes and operands of references: bounds, single elements, layouts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu.layouts as layouts
from pallas_gpu import _jax, errors, types
from pallas_gpu.entry.check import tmem, wgmma
from pallas_gpu.layouts.window import Window
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives._accesses import Access, accesses
from pallas_gpu.primitives.registers import load_p
from pallas_gpu.primitives.tensor_cores.tmem import (
    async_load_tmem_p,
    async_store_tmem_p,
)
from pallas_gpu.walk import Site, walk


def check_operands(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    """Checks the references among the operands of a primitive of ours."""
    for operand in _ref_operands(eqn):
        _operand_window(eqn, operand)


def _operand_window(eqn: _jax.JaxprEqn, operand: ops.RefOperand) -> Window:
    window = window_in_bounds(operand.ref, operand.transforms, eqn.primitive.name)
    if isinstance(operand.ref.aval, types.AccumulatorRef):
        wgmma.check_part(window, stored=False)
    if _in_tmem(operand.ref.aval):
        tmem.check_part(operand.ref.aval, window)
    return window


def _in_tmem(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) is types.TMEM


@registry.checks(async_load_tmem_p, async_store_tmem_p)
def _check_transfer(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    for operand in _ref_operands(eqn):
        window = _operand_window(eqn, operand)
        tmem.check_transfer(operand.ref.aval, window, eqn.params.get("layout"))


@registry.checks(load_p)
def _check_load(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    for operand in _ref_operands(eqn):
        window = _operand_window(eqn, operand)
        _check_layout(operand.ref.aval, window, eqn.params["layout"])


@registry.checks(_jax.get_p, _jax.swap_p, _jax.addupdate_p)
def _check_access(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    aval = eqn.invars[0].aval
    name = eqn.primitive.name
    leaves = eqn.invars[1:] if name == "get" else eqn.invars[2:]
    transforms = jax.tree.unflatten(
        eqn.params["tree"], [_static_value(v) for v in leaves]
    )
    window = window_in_bounds(eqn.invars[0], transforms, name)
    if isinstance(aval, types.AccumulatorRef):
        wgmma.check_part(window, stored=name != "get")
    if _in_tmem(aval):
        tmem.check_part(aval, window)
        tmem.check_transfer(aval, window, None)
        return
    _check_layout(aval, window, None)


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
    numbers = {var: i for i, var in enumerate(jaxpr.invars[:inputs])}
    for var, (access, site) in _writes(jaxpr).items():
        if var in numbers:
            aval = types.describe(access.ref.aval)
            raise errors.KernelError(
                f"input {numbers[var]} ({aval}) is written, but it is an input",
                expected="stores to outputs of the kernel and to scratch memory",
                got=f"{words(access.operation.name)} of an input",
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
        for access in accesses(site.eqn):
            if access.space is types.GMEM:
                kinds = found.setdefault(site.origin(access.ref), {})
                kinds.setdefault(access.operation.family == "semaphore", (access, site))
    for kinds in found.values():
        if len(kinds) == 1:
            continue
        (signal, at), (other, site) = kinds[True], kinds[False]
        raise errors.KernelError(
            f"{types.describe(other.ref.aval)} has semaphores, and is accessed as an "
            "array",
            expected="semaphore_signal, semaphore_wait and semaphore_read alone",
            got=f"{words(other.operation.name)} of it, and "
            f"{signal.operation.name}"
            + (f" at {at.where}" if at.where is not None else ""),
            hint="pass the array apart from the semaphores, plgpu.alloc_semaphore()",
            where=site.where,
        )


def written(jaxpr: _jax.Jaxpr) -> set[Any]:
    """Returns the references that a body writes, as variables of its jaxpr."""
    return set(_writes(jaxpr))


def _writes(jaxpr: _jax.Jaxpr) -> dict[Any, tuple[Access, Site]]:
    """Returns the first access that writes a reference, with its equation."""
    found: dict[Any, tuple[Access, Site]] = {}
    for site in walk(jaxpr):
        for access in accesses(site.eqn):
            if access.writes:
                found.setdefault(site.origin(access.ref), (access, site))
    return found


def static_operands(eqn: _jax.JaxprEqn) -> Any:
    """Returns the operands of a primitive of ours, with literal indices as numbers."""
    return ops.unflatten(eqn.params["tree"], list(map(_static_value, eqn.invars)))


def _ref_operands(eqn: _jax.JaxprEqn) -> list[ops.RefOperand]:
    if "tree" not in eqn.params:
        return []
    operands = static_operands(eqn)
    if not isinstance(operands, dict):
        return []
    return [x for x in operands.values() if isinstance(x, ops.RefOperand)]


def _static_value(var: Any) -> Any:
    """Returns the number of a literal index, and any other variable unchanged."""
    if not isinstance(var, _jax.Literal) or getattr(var.aval, "shape", None) != ():
        return var
    is_index = jnp.issubdtype(var.aval.dtype, jnp.integer)
    return int(var.val) if is_index else var.val


def window_in_bounds(ref: Any, transforms: Any, name: str) -> Window:
    """Resolves the steps one by one; each must be in bounds of its operand."""
    shape = tuple(ref.aval.shape)
    window = types.resolve(shape, ())
    for step in transforms:
        window = types.resolve(window.shape, (step,))
        bad = window.over_the_edge()
        if bad:
            raise _out_of_bounds(window, bad[0], name)
    # The window of a single step is that of the array.
    return types.resolve(shape, transforms) if len(transforms) > 1 else window


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
