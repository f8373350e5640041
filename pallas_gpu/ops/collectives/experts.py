# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens to experts on other devices, and back, in one trip each.

A device has a number of experts, and of each a room for the rows of every device: no
device needs to know what the others send before it sends, as DeepEP's low-latency form.
A sender computes the places of its rows itself and stores them there; a token reads its
rows where the experts are, and adds them up.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.collectives.calls import Method
from pallas_gpu.ops.collectives.devices import (
    AxisName,
    DeviceCall,
    Group,
    launch,
    varying,
)
from pallas_gpu.ops.collectives.exchange import THREADS
from pallas_gpu.ops.folded import split
from pallas_gpu.ops.rules import Array, Interpret, vary_alike

_CTAS = 132
_MOST_EXPERTS, _MOST_ROWS = 4096, 1 << 20
# Elements of a row that a CTA moves at once: eight of a thread.
_MOST = 8 * THREADS


class Dispatched(NamedTuple):
    """What `dispatch` returns.

    Attributes:
      rows: (experts of a device, devices, capacity, H): for each expert of this device
        the rows of each device. Those behind `counts` are undefined.
      counts: (experts of a device, devices), int32: the rows that have been sent.
      slots: (tokens, choices), int32: the place of each choice among the rows that this
        device has sent to the expert; -1 if it was not sent.
    """

    rows: jax.Array
    counts: jax.Array
    slots: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call(DeviceCall):
    """A call for so many experts on all devices, with room for `capacity` rows."""

    experts: int
    capacity: int

    @property
    def local(self) -> int:
        """Experts of a device."""
        return self.experts // self.group.size


@expect.arguments()
def dispatch(
    x: Array,
    experts: Array,
    axis_name: AxisName,
    *,
    num_experts: Annotated[int, expect.integer(1, _MOST_EXPERTS)],
    capacity: Annotated[
        int | None, expect.optional(expect.integer(1, _MOST_ROWS))
    ] = None,
    method: Method = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> Dispatched:
    """Sends the row of each token to the devices of the experts that it has chosen.

    Device i of the axis has the experts from i * num_experts / devices on. Each device
    stores its rows, and how many they are, in the memory of the others. The derivative
    of x is a `combine`.

    Since: sm_90. Issued by: the host, as `all_gather`. Complete when all devices have
    stored.

    Args:
      x: (tokens, H), the device's rows, of a floating-point type.
      experts: (tokens, choices), int32: the experts of each token; -1 is none.
      axis_name: name of an axis of the mesh, or a tuple of names.
      num_experts: of all devices, a multiple of their number.
      capacity: rows that a device may send to an expert; default: one for each token.
        Further ones, in the order of the tokens, are not sent.
      method: "kernel"; "lax", a `jax.lax.all_to_all`; None, a kernel where it reaches
        the devices, see `unreachable`.
      compiler_params, interpret: see `kernel`.

    Raises:
      UnsupportedError: `method="kernel"`, and it cannot reach the devices.
      ShapeError, DTypeError: the operands do not match.

    Example:
      >>> sent = dispatch(x, experts, "d", num_experts=64)
      >>> y = apply_experts(sent.rows, sent.counts)
      >>> out = combine(y, experts, sent.slots, weights, "d")
    """
    size = Group.along(axis_name).size
    _check("dispatch", x, experts)
    capacity = x.shape[0] if capacity is None else capacity
    call = _Call(
        "dispatch", axis_name, method, compiler_params, interpret,
        experts=num_experts, capacity=capacity,
    )  # fmt: skip
    if num_experts % size:
        raise errors.ShapeError(
            "dispatch: experts cannot be divided among the devices",
            expected=f"a multiple of {size} experts",
            got=num_experts,
            hint="add experts that no token chooses",
        )
    x, experts = vary_alike((varying(x, call.group), experts))
    slots, counts = _places(call, experts)
    ones = jnp.ones_like(slots, dtype=jnp.float32)
    rows, received = _sent(call, x, experts, slots, ones, counts)
    return Dispatched(rows, received, slots)


@expect.arguments()
def combine(
    y: Array,
    experts: Array,
    slots: Array,
    weights: Array,
    axis_name: AxisName,
    *,
    method: Method = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Adds up what the experts of each token have computed, times its weights.

    Each device reads the rows of its tokens where the experts are, and adds
    in float32. The derivative of y is a `dispatch` of the rows times their weights.

    Since: sm_90. Issued by: the host, as `all_gather`. Complete when all devices have
    read.

    Args:
      y: (experts of a device, devices, capacity, H), as `Dispatched.rows`.
      experts, slots: (tokens, choices), int32, those of `dispatch`.
      weights: (tokens, choices), of a floating-point type.
      axis_name: name of an axis of the mesh, or a tuple of names.
      method, compiler_params, interpret: see `dispatch`.

    Returns:
      (tokens, H), of the type of y; zeros for a token that was not sent.

    Raises:
      UnsupportedError: `method="kernel"`, and it cannot reach the devices.
      ShapeError, DTypeError: the operands do not match.
    """
    size = Group.along(axis_name).size
    if y.ndim != 4 or y.shape[1] != size:
        raise errors.ShapeError(
            "combine: the rows are not those of all devices",
            expected=f"(experts of a device, {size}, capacity, H)",
            got=tuple(y.shape),
            hint="pass what the experts make of Dispatched.rows",
        )
    call = _Call(
        "combine", axis_name, method, compiler_params, interpret,
        experts=y.shape[0] * size, capacity=y.shape[2],
    )  # fmt: skip
    _check("combine", y[0, 0], experts, slots, weights)
    operands = vary_alike((varying(y, call.group), experts, slots, weights))
    return _combined(call, *operands)


def _check(what: str, x: Any, experts: Any, *others: Any) -> None:
    same = all(a.shape == experts.shape for a in others)
    tokens = what == "combine" or x.shape[:1] == experts.shape[:1]
    if x.ndim != 2 or experts.ndim != 2 or not tokens or not same:
        raise errors.ShapeError(
            f"{what}: the shapes do not match",
            expected="rows (tokens, H), and (tokens, choices) for experts, slots and "
            "weights",
            got=" and ".join(str(tuple(a.shape)) for a in (x, experts, *others)),
            hint="a token has a row, and a number of choices",
        )
    integers = [experts, *others[:1]]
    floats = [x, *others[1:]]
    if any(a.dtype != jnp.int32 for a in integers) or not all(
        jnp.issubdtype(a.dtype, jnp.floating) for a in floats
    ):
        raise errors.DTypeError(
            f"{what}: these element types are not supported",
            expected="floating-point rows and weights, and int32 experts and slots",
            got=" and ".join(str(a.dtype) for a in (x, *integers, *floats[1:])),
            hint="convert the operands with astype",
        )


def _places(call: _Call, experts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the slot of each choice, and the number of rows for each expert."""
    flat = experts.reshape(-1)
    chosen = flat[:, None] == jnp.arange(call.experts, dtype=jnp.int32)
    before = jnp.cumsum(chosen, axis=0, dtype=jnp.int32) - chosen
    slot = jnp.sum(jnp.where(chosen, before, 0), axis=1, dtype=jnp.int32)
    sent = (flat >= 0) & (flat < call.experts) & (slot < call.capacity)
    counts = jnp.minimum(jnp.sum(chosen, axis=0, dtype=jnp.int32), call.capacity)
    return jnp.where(sent, slot, -1).reshape(experts.shape), counts


# --- kernels --------------------------------------------------------------------------


def _columns(width: int) -> int:
    """Returns the elements of a row that are moved at once, a divisor of the width."""
    count = width // THREADS
    return THREADS * max(i for i in range(1, _MOST // THREADS + 1) if count % i == 0)


def _layout(columns: int, dtype: Any) -> Any:
    most = min(columns // THREADS, 16 // jnp.dtype(dtype).itemsize)
    vector = max(v for v in (1, 2, 4, 8) if v <= most and columns // THREADS % v == 0)
    return plgpu.Layout.WG_STRIDED((columns,), vec_size=vector)


def _padded(x: jax.Array) -> jax.Array:
    """Returns rows whose length is a number of elements of all threads."""
    missing = -x.shape[-1] % THREADS
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _send(
    call: _Call, x: Any, experts: Any, slots: Any, weights: Any, numbers: Any, into: Any
) -> tuple[Any, Any]:
    """Stores rows, times weights, and their numbers, in the memory of the devices."""
    choices, width = experts.shape[1], x.shape[1]
    columns = _columns(width)
    layout = _layout(columns, x.dtype)
    rows = x.shape[0] * choices

    def store(
        me: Any, unit: Any, x: Any, experts: Any, slots: Any, weights: Any,
        numbers: Any, into: Any, counts: Any,
    ) -> None:  # fmt: skip
        @plgpu.when(unit >= rows)
        def _() -> None:
            expert = unit - np.int32(rows)
            there, local = split(expert, call.local)
            target = call.group.peer(counts, there)
            target.at[local, me].set(numbers[expert])

        @plgpu.when(unit < rows)
        def _() -> None:
            token, choice = split(unit, choices)
            there, local = split(experts[token, choice], call.local)
            slot, weight = slots[token, choice], weights[token, choice]

            @plgpu.when(slot >= 0)
            def _() -> None:
                target = call.group.peer(into, there).at[local, me, slot]
                for start in range(0, width, columns):
                    at = plgpu.ds(start, columns)
                    value = plgpu.load(x.at[token, at], layout=layout)
                    value = value.astype(jnp.float32) * weight
                    target.at[at].set(value.astype(x.dtype))

    ref = jax.new_ref(into)
    counts = jax.ShapeDtypeStruct((call.local, call.group.size), jnp.int32)
    units = rows + call.experts
    kernel = launch(
        call.group, "dispatch", store, counts, units, _CTAS, **call.of_kernels
    )
    received = kernel(x, experts, slots, weights, numbers, ref)
    return jax.freeze(ref), received


def _read(call: _Call, y: Any, experts: Any, slots: Any, weights: Any) -> jax.Array:
    """Reads rows at the devices of the experts, and adds them up."""
    (tokens, choices), width = experts.shape, y.shape[-1]
    columns = _columns(width)
    layout = _layout(columns, y.dtype)
    parts = width // columns

    def add(me: Any, unit: Any, y: Any, experts: Any, slots: Any, weights: Any,
            out: Any) -> None:  # fmt: skip
        token, part = split(unit, parts)
        at = plgpu.ds(part * columns, columns)
        total = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), layout)
        for choice in range(choices):
            expert, slot = experts[token, choice], slots[token, choice]
            weight = weights[token, choice]

            def more(total: Any, expert=expert, slot=slot, weight=weight) -> Any:
                there, local = split(expert, call.local)
                row = call.group.peer(y, there).at[local, me, slot, at]
                value = plgpu.load(row, layout=layout).astype(jnp.float32)
                return total + value * weight

            total = lax.cond(slot >= 0, more, lambda total: total, total)
        out.at[token, at].set(total.astype(y.dtype))

    out = jax.ShapeDtypeStruct((tokens, width), y.dtype)
    kernel = launch(
        call.group, "combine", add, out, tokens * parts, _CTAS, **call.of_kernels
    )
    return kernel(y, experts, slots, weights)


# --- what the functions do, and their derivatives -------------------------------------


def _run_sent(
    call: _Call, x, experts, slots, weights, numbers, *, fill: bool = False
) -> tuple[jax.Array, jax.Array]:
    n, local = call.group.size, call.local
    if call.reaches():
        rows = _padded(x)
        shape = local, n, call.capacity, rows.shape[1]
        into = jnp.zeros(shape, x.dtype) if fill else plgpu.empty(shape, x.dtype)
        into = varying(into, call.group)
        sent, received = _send(call, rows, experts, slots, weights, numbers, into)
        return sent[..., : x.shape[1]], received
    scaled = x[:, None].astype(jnp.float32) * weights[..., None]
    place = jnp.where(slots < 0, call.capacity, slots)
    room = jnp.zeros((call.experts, call.capacity, x.shape[1]), x.dtype)
    sent = room.at[experts, place].set(scaled.astype(x.dtype), mode="drop")

    def exchanged(of_experts: jax.Array) -> jax.Array:
        of_devices = of_experts.reshape(n, local, *of_experts.shape[1:])
        return jnp.moveaxis(_exchanged(call, of_devices), 0, 1)

    return exchanged(sent), exchanged(numbers)


def _exchanged(call: _Call, of_devices: jax.Array) -> jax.Array:
    if call.group.size == 1:
        return of_devices
    return lax.all_to_all(of_devices, call.axis_name, 0, 0, tiled=True)


def _run_combined(call: _Call, y, experts, slots, weights) -> jax.Array:
    weights = weights.astype(jnp.float32)
    if call.reaches():
        return _read(call, _padded(y), experts, slots, weights)[:, : y.shape[-1]]
    returned = _exchanged(call, jnp.moveaxis(y, 1, 0))
    returned = returned.reshape(call.experts, call.capacity, y.shape[-1])
    rows = returned[experts, jnp.maximum(slots, 0)].astype(jnp.float32)
    used = jnp.where(slots[..., None] >= 0, rows * weights[..., None], 0)
    return used.sum(axis=1).astype(y.dtype)


_sent = jax.custom_vjp(_run_sent, nondiff_argnums=(0,))
_combined = jax.custom_vjp(_run_combined, nondiff_argnums=(0,))


def _sent_backward(call: _Call, residuals: Any, g: Any) -> Any:
    experts, slots, weights, _ = residuals
    return _run_combined(call, g[0], experts, slots, weights), None, None, None, None


def _combined_backward(call: _Call, residuals: Any, g: jax.Array) -> Any:
    y, experts, slots, weights = residuals
    _, numbers = _places(call, experts)
    scales = weights.astype(jnp.float32)
    of_y, _ = _run_sent(call, g, experts, slots, scales, numbers, fill=True)
    # Each choice alone: its row, of which the product with g is the derivative.
    alone = (a.reshape(-1, 1) for a in (experts, slots, jnp.ones_like(weights)))
    rows = _run_combined(call, y, *alone).reshape(*weights.shape, -1)
    of_weights = jnp.einsum(
        "tch,th->tc", rows, g, preferred_element_type=jnp.float32
    ).astype(weights.dtype)
    return of_y, None, None, of_weights


_sent.defvjp(
    lambda call, x, *others: (_run_sent(call, x, *others), others), _sent_backward
)
_combined.defvjp(
    lambda call, *operands: (_run_combined(call, *operands), operands),
    _combined_backward,
)
