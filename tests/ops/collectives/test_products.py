# SPDX-License-Identifier: Apache-2.0
"""Products with a gathered operand or a scattered result equal those of `jax.lax`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import ops
from pallas_gpu.ops import collectives
from tests.support.meshes import emulated, mesh, numbers
from tests.support.refusal import refused

ROWS, COLUMNS = jax.P("d"), jax.P(None, "d")
# What a function of devices takes and returns, and what equals it.
KINDS = {
    "gather": (
        collectives.all_gather_matmul,
        lambda x, w: lax.all_gather(x, "d", axis=0, tiled=True) @ w,
        {"in_specs": (ROWS, COLUMNS), "out_specs": COLUMNS},
    ),
    "scatter": (
        collectives.matmul_reduce_scatter,
        lambda x, w: lax.psum_scatter(x @ w, "d", scatter_dimension=0, tiled=True),
        {"in_specs": (COLUMNS, ROWS), "out_specs": ROWS},
    ),
}
SMALL = {"tile_m": 64, "tile_n": 32, "tile_k": 64, "stages": 2, "epilogue_n": 32}


def operands(kind, devices, m, k, n):
    """A device's rows, K and columns; sums are exact, also when they are rounded."""
    rows, columns = (devices, 1) if kind == "gather" else (1, devices)
    m, n = m * rows, n * rows
    return (
        numbers(m * columns, k * columns, dtype="bfloat16", most=1),
        numbers(k * columns, n, dtype="bfloat16", most=1),
    )


def check(kind, devices, sizes, **options):
    ours, theirs, specs = KINDS[kind]
    args = operands(kind, devices, *sizes)
    f = emulated(lambda x, w: ours(x, w, "d", **options), mesh(d=devices), **specs)
    expected = emulated(theirs, mesh(d=devices), **specs)(*args)
    np.testing.assert_array_equal(f(*args), expected)


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_20_schedules(kind, devices):
    config = ops.MatmulConfig(**SMALL, blocks=2, cluster=None)
    interpret = plgpu.InterpretParams(schedules=20)
    check(
        kind, devices, (64, 64, 32),
        method="kernel", config=config, interpret=interpret,
    )  # fmt: skip


@pytest.mark.parametrize("cluster", [None, "m", "n"])
@pytest.mark.parametrize("kind", KINDS)
def test_several_tiles_of_a_cta(kind, cluster):
    """Rings and semaphores are used again and again."""
    config = ops.MatmulConfig(**SMALL, blocks=4, cluster=cluster)
    check(kind, 2, (192, 640, 96), method="kernel", config=config)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_no_tile_divides(kind):
    rows = 72 if kind == "gather" else 64
    check(kind, 2, (rows, 72, 96), method="kernel")


@pytest.mark.parametrize("method", ["kernel", "separate", "lax"])
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind, method):
    ours, theirs, specs = KINDS[kind]
    args = operands(kind, 2, 64, 64, 64)

    def gradient(f):
        g = jax.shard_map(f, mesh=mesh(d=2), **specs)
        like = jax.eval_shape(g, *args)
        weights = numbers(*like.shape, most=1)
        loss = lambda x, w: (weights * g(x, w).astype(jnp.float32)).sum()  # noqa: E731
        return plgpu.emulate_mesh(jax.grad(loss, (0, 1)))(*args)

    got = gradient(lambda x, w: ours(x, w, "d", method=method))
    jax.tree.map(np.testing.assert_array_equal, got, gradient(theirs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["float32", "processes", "blackwell"])
def test_operations_of_their_own(kind, what, monkeypatch):
    """Where one kernel does not do both, two do, or a collective of `jax.lax`."""
    ours, theirs, specs = KINDS[kind]
    x, w = operands(kind, 2, 64, 64, 64)
    options = {}
    if what == "float32":
        x, w = x.astype(what), w.astype(what)
    elif what == "processes":
        monkeypatch.setattr(jax, "process_count", lambda: 2)
    else:
        options["compiler_params"] = plgpu.CompilerParams(target="sm_100a")
    f = emulated(lambda x, w: ours(x, w, "d", **options), mesh(d=2), **specs)
    jaxpr = str(jax.make_jaxpr(f.__wrapped__)(x, w))
    assert "name=all_gather_matmul" not in jaxpr
    assert "name=matmul_reduce_scatter" not in jaxpr
    np.testing.assert_array_equal(f(x, w), emulated(theirs, mesh(d=2), **specs)(x, w))


X, W = np.zeros((64, 32), jnp.bfloat16), np.zeros((32, 64), jnp.bfloat16)
ON_BLACKWELL = {"compiler_params": plgpu.CompilerParams(target="sm_100a")}
REFUSED = {
    "depth": lambda f: f(X, X, "d"),
    "types": lambda f: f(X, W.astype("float16"), "d"),
    "float32": lambda f: f(
        *(x.astype("float32") for x in (X, W)), "d", method="kernel"
    ),
    "columns": lambda f: f(X, W[:, :33], "d", method="kernel"),
    "rows": lambda f: f(X[:33], W, "d", method="kernel"),
    "blackwell": lambda f: f(X, W, "d", method="kernel", **ON_BLACKWELL),
    "method": lambda f: f(X, W, "d", method="ring"),
    "config": lambda f: f(X, W, "d", config=3),
    "a transposed kernel": lambda f: f(
        jnp.concatenate([X, X]),
        W,
        "d",
        method="kernel",
        config=ops.MatmulConfig(**SMALL, transposed=True),
    ),
    "parts of wider columns": lambda f: f(
        jnp.concatenate([X, X]),
        jnp.concatenate([W, W[:, :32]], 1),
        "d",
        method="kernel",
        config=ops.MatmulConfig(),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@refused
def test_a_refused_call(name):
    specs = {"in_specs": (), "out_specs": ROWS, "check_vma": False}
    function = collectives.matmul_reduce_scatter
    emulated(lambda: REFUSED[name](function), mesh(d=2), **specs)()
