# SPDX-License-Identifier: Apache-2.0
"""Scratch of SparseCore tiling in kernels whose tiling is compact."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from pallas_gpu.sparsecore.check import budgets
from tests.support.refusal import refused, refused_by
from tests.support.sparsecore import emitted
from tests.support.sparsecore.kernels import check, kernel, lanes, part
from tests.support.sparsecore.modules import needs_libtpu
from tests.support.sparsecore.tracing import array, trace

X = np.arange(1024, dtype=np.float32)
N = np.arange(256, dtype=np.int32) * 65539 % 65521
ROWS = np.arange(16, dtype=np.int32)[::-1] * 4 + 2
COMPACT = plsc.VMEM((1024,), jnp.float32)


def tiled(*shape, dtype=jnp.float32, space=plsc.VMEM):
    return space(shape, dtype, tiling="sparsecore")


def _vectors(x, o, v, words):
    """Adds to bf16 what words hold in pairs."""
    plsc.sync_copy(x, words)

    @plsc.loop(0, 256, step=lanes())
    def _(i):
        v[0, plsc.ds(2 * i, 2 * lanes())] = plsc.bitcast(words[part(i)], jnp.bfloat16)
        narrow = v[0, plsc.ds(2 * i, 2 * lanes())]
        words[part(i)] = plsc.bitcast(narrow + narrow, jnp.int32)

    plsc.sync_copy(words, o)


def _doubled(x):
    pairs = x.view(jnp.bfloat16)
    return (pairs + pairs).view(np.int32)


def _copies(x, o, v, w):
    """Vectors of words go from one tiling to the other, whole and in part."""
    half = plsc.ds(0, 512)
    plsc.sync_copy(x.at[plsc.ds(512, 512)], v.at[half])
    plsc.sync_copy(x.at[plsc.ds(40, 512)], v.at[plsc.ds(512, 512)])

    def through(shared):
        plsc.sync_copy(v, shared)
        plsc.sync_copy(shared.at[plsc.ds(512, 512)], w.at[3, half])

    plsc.run_scoped(through, plsc.VMEM_SHARED((1024,), jnp.float32))
    plsc.sync_copy(w.at[3, half], o.at[plsc.ds(512, 512)])
    plsc.sync_copy(v.at[half], o.at[half])


def _copied(x):
    return np.concatenate([x[512:], x[40:552]])


def _rows(x, r, o, rows, v, shared, some):
    """Gathers rows of 16 from shared memory, and adds them there."""
    plsc.sync_copy(x, some)
    plsc.sync_copy(r, rows)

    @plsc.loop(0, 64)
    def _(i):
        for j in range(0, 16, lanes()):
            v[i, part(j)] = some[part(i * 16 + j)]

    plsc.sync_copy(v, shared)
    plsc.sync_copy(shared.at[rows], v.at[plsc.ds(0, 16)])
    plsc.sync_copy(v.at[plsc.ds(0, 16)], shared.at[rows], add=True)
    plsc.sync_copy(shared, v)

    @plsc.loop(0, 64)
    def _(i):
        for j in range(0, 16, lanes()):
            some[part(i * 16 + j)] = v[i, part(j)]

    plsc.sync_copy(some, o)


def _added(x):
    table = x.reshape(64, 16).copy()
    table[ROWS] *= 2
    return table.reshape(-1)


def _positions(x, o, v):
    """Scatters and prints what `get_global` has made."""
    own = plsc.get_global(tiled(3, 64))
    plsc.sync_copy(x, v)
    at = lax.iota(jnp.int32, lanes())
    for j in range(0, 64, lanes()):
        own[1, part(j)] = v[part(j)]
    plsc.store_scatter(own, [at * 0 + 1, at * 2], v[part(64)])
    plsc.debug_print("row {}", own.at[1])
    v[part(0)] = plsc.load_gather(own, [at * 0 + 1, at])
    plsc.sync_copy(v, o)


def _scattered(x, n):
    out = x.copy()
    out[0:n:2] = x[64 : 64 + n // 2]
    return out


@pytest.mark.parametrize(
    "body, args, expected, scratch",
    [
        (_vectors, [N], _doubled(N), [tiled(2, 512, dtype=jnp.bfloat16),
                                      plsc.VMEM((256,), jnp.int32)]),
        (_copies, [X], _copied(X), [tiled(1024), plsc.VMEM((8, 512), jnp.float32)]),
        (_rows, [X, ROWS], _added(X), [
            plsc.VMEM((16,), jnp.int32), tiled(64, 16),
            tiled(64, 16, space=plsc.VMEM_SHARED), COMPACT]),
        (_positions, [X], _scattered(X, 16), [COMPACT]),
    ],
    ids=["narrow vectors", "copies", "rows of 16", "positions"],
)  # fmt: skip
def test_it_holds_what_compact_tiling_does_not(body, args, expected, scratch):
    check(body, args, expected, *scratch, subcores=1)


def _first_row(shape):
    def body(x, o, v):
        plsc.sync_copy(x, v.at[0])
        plsc.sync_copy(v.at[0], o)

    return kernel(body, X[:16], tiled(*shape))


@needs_libtpu
def test_it_has_the_words_of_its_tiling(monkeypatch):
    emitted.compiled(_first_row((8192, 16)), X[:16])  # all of VMEM
    with pytest.raises(errors.OutOfResources):
        jax.make_jaxpr(_first_row((8193, 16)))(X[:16])
    monkeypatch.setattr(budgets, "require", lambda *_: None)
    with pytest.raises(errors.CompilationError, match="AllocationFailure"):
        emitted.compiled(_first_row((8193, 16)), X[:16])


def test_upstream_names_of_tilings():
    upstream = types.SimpleNamespace(name="SPARSE_CORE")  # pltpu.Tiling.SPARSE_CORE
    assert plsc.VMEM((8,), jnp.int32, tiling=upstream) == tiled(8, dtype=jnp.int32)
    assert plsc.CompilerParams(tiling=upstream).tiling == "sparsecore"


@pytest.mark.parametrize("count", [3, 5])
def test_the_last_of_an_odd_number_of_rows(count):
    x = np.arange(2 * count * 64, dtype=np.float32).reshape(2, count, 64)

    def body(x, o, v):
        plsc.sync_copy(x.at[1, count - 1], v)
        plsc.sync_copy(v, o)

    check(body, [x], x[1, count - 1], plsc.VMEM((64,), jnp.float32), subcores=1)


MATRIX = {"inputs": (array(16, 128),), "out_type": array(16, 128)}


@refused_by(trace, **MATRIX, scratch_types=[tiled(16, 128)])
def test_rows_between_two_tilings(x, o, v):
    plsc.sync_copy(x, v)  # HERE


@refused_by(
    trace,
    inputs=(array(256, dtype=jnp.bfloat16),),
    scratch_types=[tiled(256, dtype=jnp.bfloat16)],
)
def test_narrow_vectors_between_two_tilings(x, o, v):
    plsc.sync_copy(x, v)  # HERE


@refused_by(
    trace,
    **MATRIX,
    scratch_types=[plsc.VMEM((16, 128), jnp.float32, tiling="compact")],
    compiler_params=plsc.CompilerParams(tiling="sparsecore"),
)
def test_compact_scratch_in_a_kernel_of_the_other_tiling(x, o, v):
    plsc.sync_copy(x, v)


@refused
def test_a_tiling_of_scalars():
    plsc.SMEM((16,), jnp.int32, tiling="sparsecore")


@refused
def test_an_unknown_tiling():
    plsc.VMEM((16,), jnp.int32, tiling=(8,))
