# SPDX-License-Identifier: Apache-2.0
"""Functions of `jax.shard_map` over devices that JAX does not have.

The body runs under `jax.vmap`, once over each axis of the mesh: JAX's own collectives
know these axes. A kernel whose devices access each other's memory gathers its operands
from one axis after the other, and runs when it has those of all devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from pallas_gpu import _jax, errors, expect
from pallas_gpu.emulator import report
from pallas_gpu.emulator.run import run
from pallas_gpu.entry import call, scope
from pallas_gpu.program.rewrite import Retrace

__all__ = ["emulate_mesh"]


@expect.arguments()
def emulate_mesh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs `fn` with all devices of its mesh in this process.

    `fn` calls a `jax.shard_map` over a `jax.sharding.AbstractMesh` (or a mesh of
    devices, which are not used) with axes of type `Auto`. JAX needs one CPU device.
    Kernels run in the emulator, those whose devices access each other's memory as one
    machine; errors are raised as they are, without JAX's words around them. Everything
    else in the body runs as under `jax.vmap` over each axis of the mesh, collectives
    included.

    Args:
      fn: a function of arrays.

    Returns:
      A function of the same arguments and results, which cannot be traced.

    Raises:
      UnsupportedError: the `jax.shard_map` leaves axes of its mesh to the compiler.

    Example:
      >>> mesh = jax.sharding.AbstractMesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
      >>> f = jax.shard_map(kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
      >>> y = plgpu.emulate_mesh(f)(x)
    """

    @functools.wraps(fn)
    def on_mesh(*args: Any, **kwargs: Any) -> Any:
        traced = jax.make_jaxpr(fn, return_shape=True)
        closed, shapes = traced(*args, **kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        results = _Outside().run(closed, leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return on_mesh


class _Outside(Retrace):
    """Evaluates what is around a `jax.shard_map`, and that on all devices."""

    def is_replaced(self, eqn: Any) -> bool:
        return eqn.primitive.name == "shard_map"

    def results(self, eqn: Any, operands: list[Any]) -> list[Any] | None:
        return _on_all(eqn, operands) if self.is_replaced(eqn) else None


class _Inside(Retrace):
    """Evaluates the body of a `jax.shard_map` under `jax.vmap`.

    That knows by itself which axes of the mesh a value varies over, and JAX converts
    types that say so in a mesh only. So all is traced again without them.
    """

    def is_replaced(self, eqn: Any) -> bool:
        return True

    def results(self, eqn: Any, operands: list[Any]) -> list[Any] | None:
        match eqn.primitive.name:
            case "pvary":
                return operands
            case "psum_invariant":
                return [jax.lax.psum(x, eqn.params["axes"]) for x in operands]
            case _:
                return None


def _on_all(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates the body of a `jax.shard_map` on all devices."""
    params, mesh = eqn.params, eqn.params["mesh"]
    names, sizes = mesh.axis_names, mesh.axis_sizes
    manual = params["newly_manual_axes"]
    if set(manual) != set(names):
        raise errors.UnsupportedError(
            "emulate_mesh: jax.shard_map leaves axes of its mesh to the compiler",
            expected=f"a jax.shard_map over all axes, {names}",
            got=f"one over {tuple(manual)}",
            hint="leave axis_names out",
            where=scope.called_at(),
        )

    def body(*own: Any) -> list[Any]:
        return _Inside().run(params["jaxpr"], own)

    for name, size in zip(names[::-1], sizes[::-1], strict=True):
        body = jax.vmap(body, axis_name=name, axis_size=size)
    parts = zip(args, params["in_specs"], strict=True)
    outs = body(*[_split(x, spec, names, sizes) for x, spec in parts])
    joined = zip(outs, params["out_specs"], strict=True)
    return [_join(x, spec, names, sizes) for x, spec in joined]


def _axes_of(spec: Any, ndim: int) -> list[tuple[Any, ...]]:
    """Returns for each dimension the axes of the mesh that divide it."""
    given = [() if x is None else x if isinstance(x, tuple) else (x,) for x in spec]
    return given + [()] * (ndim - len(given))


def _split(x: Any, spec: Any, names: Any, sizes: Any) -> jax.Array:
    """Returns the parts of all devices, with the axes of the mesh in front."""
    x, number = jnp.asarray(x), dict(zip(names, sizes, strict=True))
    shape: list[int] = []
    found: dict[Any, int] = {}
    for n, axes in zip(x.shape, _axes_of(spec, x.ndim), strict=True):
        for axis in axes:
            found[axis] = len(shape)
            shape.append(number[axis])
            n //= number[axis]
        shape.append(n)
    order = [found[name] for name in names if name in found]
    rest = [i for i in range(len(shape)) if i not in order]
    parts = x.reshape(shape).transpose(*order, *rest)
    ones = [number[name] if name in found else 1 for name in names]
    own = parts.shape[len(order) :]
    return jnp.broadcast_to(parts.reshape(*ones, *own), (*sizes, *own))


def _join(x: jax.Array, spec: Any, names: Any, sizes: Any) -> jax.Array:
    """Returns the whole array; of those that several devices have, the first one's."""
    axes = _axes_of(spec, x.ndim - len(names))
    divided = {axis for own in axes for axis in own}
    x = x[tuple(slice(None) if name in divided else 0 for name in names)]
    left = [name for name in names if name in divided]
    order: list[int] = []
    shape: list[int] = []
    for i, own in enumerate(axes):
        order += [left.index(axis) for axis in own] + [len(left) + i]
        parts = [sizes[names.index(axis)] for axis in own]
        shape.append(int(np.prod([*parts, x.shape[len(left) + i]])))
    return x.transpose(order).reshape(shape)


# --- kernels whose devices access each other's memory ---------------------------------

# A kernel with operands from some axes of its mesh, which are in front of the others;
# `gathered` are their names in that order.
_gathering_p = _jax.Primitive("pallas_gpu_kernel_on_devices")
_gathering_p.multiple_results = True


def _gather(
    axis_data: Any, args: Any, dims: Any, *, gathered: Any = (), **params: Any
) -> Any:
    if axis_data.name not in params["devices"].names:
        raise errors.UnsupportedError(
            f"kernel {params['name']}: jax.vmap of a function of emulate_mesh",
            expected="jax.vmap in the body of the jax.shard_map",
            got="jax.vmap around it",
            where=scope.called_at(),
        )
    size = axis_data.size
    moved = [
        jnp.broadcast_to(x, (size, *jnp.shape(x)))
        if at is None
        else jnp.moveaxis(x, at, 0)
        for x, at in zip(args, dims, strict=True)
    ]
    outs = _gathering_p.bind(*moved, gathered=(axis_data.name, *gathered), **params)
    return outs, [0] * len(outs)


@_gathering_p.def_effectful_abstract_eval
def _types(*_: Any, gathered: Any, devices: Any, out_avals: Any, **params: Any) -> Any:
    sizes = dict(devices.axes)
    lead = [sizes[name] for name in gathered]
    effects = {_jax.FfiEffect()} if call.is_observable(params["jaxpr"]) else set()
    return [_jax.ShapedArray((*lead, *x.shape), x.dtype) for x in out_avals], effects


def _execute(launch: call.CallParams, gathered: Any, args: Any) -> list[np.ndarray]:
    """Runs a kernel on all devices."""
    devices = launch.devices
    assert devices is not None
    if len(gathered) < len(devices.names):
        raise errors.InternalError(
            "A kernel on several devices has the operands of some",
            expected=devices.names,
            got=gathered,
        )
    order = [gathered.index(name) for name in devices.names]
    front = range(len(order))
    each = [np.moveaxis(np.asarray(x), order, front) for x in args]
    flat = [x.reshape(devices.size, *x.shape[len(order) :]) for x in each]
    results = run(launch, [[x[i] for x in flat] for i in range(devices.size)])
    stacked = [np.stack(x) for x in zip(*results, strict=True)]
    return [
        np.moveaxis(x.reshape(*devices.sizes, *x.shape[1:]), front, order)
        for x in stacked
    ]


@_gathering_p.def_impl
def _impl(*args: Any, gathered: Any, **params: Any) -> list[jax.Array]:
    results = _execute(call.CallParams(**params), gathered, args)
    return [jnp.asarray(x) for x in results]


def _as_callback(*args: Any, gathered: Any, **params: Any) -> Any:
    launch = call.CallParams(**params)

    def callback(*arrays: Any) -> list[np.ndarray]:
        return report.from_the_kernels_line(lambda: _execute(launch, gathered, arrays))

    avals, _ = _types(gathered=gathered, **params)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    called = io_callback if launch.is_observable else jax.pure_callback
    return called(callback, results, *args)


_jax.batching.fancy_primitive_batchers[_gathering_p] = _gather
_jax.mlir.register_lowering(
    _gathering_p, _jax.mlir.lower_fun(_as_callback, multiple_results=True)
)
call.ABOVE.gathering = _gather
