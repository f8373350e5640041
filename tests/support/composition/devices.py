# SPDX-License-Identifier: Apache-2.0
"""Kernels on several devices, which are CPUs of another process.

`python -m tests.support.composition.devices` runs the cells that need two devices and
prints what each has come to, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import errors, ops
from tests.support.composition.row import (
    CELLS,
    SHARDED,
    VECTOR,
    XS,
    Refused,
    Row,
    Way,
    X,
    run_cell,
)

XS = XS[:2]
ROW = jax.ShapeDtypeStruct((1, *VECTOR.shape), VECTOR.dtype)


def mesh() -> Any:
    return jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(f: Any, out: Any = None, **options: Any) -> Any:
    specs = {"in_specs": jax.P("d"), "out_specs": jax.P("d") if out is None else out}
    return jax.shard_map(f, mesh=mesh(), **specs, **options)


def shard_map(way: Way) -> None:
    way.check(sharded(way.make(out=ROW)), XS, expected=2 * XS)


def shard_map_unchecked(way: Way) -> None:
    way.check(sharded(way.make(out=ROW), check_vma=False), XS, expected=2 * XS)


def position(way: Way) -> None:
    def body(x, o):
        o[...] = x[...] + lax.axis_index("d").astype(jnp.float32)

    expected = XS + np.arange(2, dtype=np.float32)[:, None]
    way.check(sharded(way.make(body, ROW)), XS, expected=expected)


def collective(way: Way) -> None:
    k = way.make(out=ROW)
    f = sharded(lambda x: lax.psum(k(x), "d")[0], out=jax.P())
    way.check(f, XS, expected=2 * (XS[0] + XS[1]))


def gradient(way: Way) -> None:
    k = way.make(out=ROW)
    rule = jax.custom_vjp(k)
    rule.defvjp(lambda x: (k(x), None), lambda _, g: (k(g),))
    f = jax.grad(lambda xs: sharded(rule)(xs).sum())
    way.check(f, XS, expected=np.full_like(XS, 2))


def gradient_of_shared(way: Way) -> None:
    def product(x, w, o):
        o[...] = x[...] * w[...]

    k = way.make(product, ROW)
    rule = jax.custom_vjp(k)
    rule.defvjp(
        lambda x, w: (k(x, w), (x, w)), lambda xw, g: (k(g, xw[1]), k(xw[0], g))
    )

    def local(x, w):
        # Its derivative is the sum over the devices.
        return rule(x, jax.lax.pcast(w, "d", to="varying"))

    both = jax.P("d"), jax.P()
    f = jax.shard_map(local, mesh=mesh(), in_specs=both, out_specs=jax.P("d"))
    expected = XS.sum(axis=0, keepdims=True)
    gradient = jax.grad(lambda w: f(XS, w).sum())
    way.check(gradient, np.ones_like(XS[:1]), expected=expected)


def mutable(way: Way) -> None:
    k = way.in_place(lambda r: r.set(r[...] * 2))

    def local(x):
        ref = jax.new_ref(x)
        k(ref)
        return jax.freeze(ref)

    way.check(sharded(local), XS, expected=2 * XS)


def sharded_ref(way: Way) -> None:
    placed = jax.NamedSharding(mesh(), jax.P("d"))
    ref = jax.new_ref(jax.device_put(XS, placed))
    way.run(way.in_place(lambda r: r.set(r[...] * 2)), ref)


def inside_vmap(way: Way) -> None:
    f = jax.vmap(sharded(way.make(out=ROW)))
    way.check(f, XS[None], expected=2 * XS[None])


def inside_shard_map(way: Way) -> None:
    f = jax.shard_map(
        jax.vmap(way.make(), spmd_axis_name=None),
        mesh=mesh(), in_specs=jax.P("d"), out_specs=jax.P("d"),
    )  # fmt: skip
    way.check(f, XS, expected=2 * XS)


def pmap(way: Way) -> None:
    way.check(jax.pmap(way.make()), XS, expected=2 * XS)


def placed(way: Way) -> None:
    """The result of an eager call is where its arguments are."""
    x = jax.device_put(X, jax.devices()[1])
    result = way.run(way.make(), x)
    assert result.devices() == x.devices()
    np.testing.assert_array_equal(result, 2 * X)


def on(spec: Any, kind: str = "Auto") -> Any:
    types = (jax.sharding.AxisType[kind],)
    return jax.NamedSharding(jax.make_mesh((2,), ("d",), axis_types=types), spec)


def replicated(way: Way) -> None:
    """The result of operands that devices have whole is whole on each of them."""
    place = on(jax.P())
    with jax.set_mesh(place.mesh):
        result = way.run(way.make(), jax.device_put(X, place))
        assert result.sharding.device_set == place.device_set
        assert result.sharding.is_fully_replicated
        np.testing.assert_array_equal(result, 2 * X)
        # Of jax 0.12's own callbacks under jit, eager operations refuse the result.
        if jax.__version__.startswith("0.11."):
            np.testing.assert_array_equal(result + jnp.zeros_like(X), 2 * X)


def sharded_operand(way: Way) -> None:
    way.run(way.make(), jax.device_put(X, on(jax.P("d"))))


def sharded_explicitly(way: Way) -> None:
    way.run(way.make(), jax.device_put(X, on(jax.P("d"), "Explicit")))


def sharded_instances(way: Way) -> None:
    way.run(jax.vmap(way.make()), jax.device_put(XS, on(jax.P("d"))))


def sharded_in_a_program(way: Way) -> None:
    """XLA's partitioner chooses the sharding of what a program computes."""
    k = way.make()
    way.run(jax.jit(lambda x: k(jnp.sin(x) + 1)), jax.device_put(X, on(jax.P("d"))))


def ready(way: Way) -> None:
    f = sharded(lambda x: ops.collectives.all_reduce(x, "d"))
    way.check(f, XS, expected=np.stack([XS.sum(axis=0)] * 2))


def ready_in_scan(way: Way) -> None:
    """Several launches, in each of which the devices meet."""

    def step(x, _):
        return ops.collectives.rotate(x, "d") + 1, None

    f = sharded(lambda x: lax.scan(step, x, length=3)[0])
    way.check(f, XS, expected=XS[::-1] + 3)


def gradient_of_ready(way: Way) -> None:
    weights = np.arange(4.0, dtype=np.float32)[:, None]
    f = sharded(lambda x: ops.collectives.all_gather(x, "d"))
    g = jax.grad(lambda xs: (f(xs) * weights).sum())
    way.check(g, XS, expected=np.ones_like(XS) * [[0 + 2], [1 + 3]])


# Before a launch shardings are known, and the error is this package's own.
_KNOWN = dataclasses.replace(SHARDED, error=errors.UnsupportedError)
_SHARDED = {"eager": _KNOWN, "jit": SHARDED}

ROWS = (
    Row("`shard_map(check_vma=True)`", shard_map, devices=2),
    Row("`shard_map(check_vma=False)`", shard_map_unchecked, devices=2),
    Row("`lax.axis_index` of a `shard_map` in the body", position, devices=2),
    Row("`lax.psum` of a result in a `shard_map`", collective, devices=2),
    Row("`grad` of a `shard_map`", gradient, devices=2),
    Row(
        "`grad` of a `shard_map`, of an operand that all devices share",
        gradient_of_shared,
        devices=2,
        note="the operand passes through `jax.lax.pcast` before the `custom_vjp`",
    ),
    Row(
        "a `jax.Ref` in a `shard_map`",
        mutable,
        {
            "eager": Refused(
                ValueError,
                "Eager shard_map cannot return a `jax.Ref`",
                "JAX makes no `jax.Ref` in an eager `shard_map`; jit it",
            )
        },
        devices=2,
    ),
    Row("a `jax.Ref` sharded over two devices", sharded_ref, _SHARDED, devices=2),
    Row("`vmap` of a `shard_map`", inside_vmap, devices=2),
    Row("`vmap` in a `shard_map`", inside_shard_map, devices=2),
    Row("`pmap`", pmap, devices=2),
    Row("arguments on another device", placed, devices=2),
    Row("`ops.collectives` in a `shard_map`", ready, devices=2),
    Row("`ops.collectives` in a `lax.scan`", ready_in_scan, devices=2),
    Row("`grad` of `ops.collectives`", gradient_of_ready, devices=2),
    Row("arguments that each of two devices has whole", replicated, devices=2),
    Row("arguments sharded over two devices", sharded_operand, _SHARDED, devices=2),
    Row(
        "arguments sharded over an explicit axis of two devices",
        sharded_explicitly,
        {"all": _KNOWN},
        devices=2,
    ),
    Row(
        "`vmap` over an axis that is sharded over two devices",
        sharded_instances,
        _SHARDED,
        devices=2,
    ),
    Row(
        "arguments that XLA shards over two devices",
        sharded_in_a_program,
        {"all": SHARDED},
        devices=2,
    ),
)


def main() -> None:
    """Prints the traceback, or null, of each cell."""
    found: dict[str, str | None] = {}
    for row in ROWS:
        for way in CELLS:
            try:
                run_cell(row, way)
                found[f"{row.name} {way}"] = None
            except BaseException:
                found[f"{row.name} {way}"] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
