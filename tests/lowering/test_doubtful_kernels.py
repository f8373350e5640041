# SPDX-License-Identifier: Apache-2.0
"""Kernels that the compiler may refuse for what the emulator does not see: layouts.

Whether data goes through SMEM, and whether a thread has whole words, depends on them.
What matters is that the emulator refuses what the compiler does.
"""

from __future__ import annotations

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch, errors
from tests.support import acceptance, everywhere
from tests.support.refusal import refused
from tests.support.semantics import BOTH, Lane, Warpgroup, under

SMEM_BYTES = arch.SM_90A.smem_bytes_per_block
EXAMPLES = hypothesis.settings(
    max_examples=10, deadline=None, derandomize=True, database=None
)


def require_agreement(function, *args, has_line=True):
    """The compiler refuses a kernel if and only if the emulator does."""
    verdict = acceptance.judge(function, args, execute=False)
    for error in verdict.refusals:
        assert error.got is not None, error
        assert error.where or not has_line, error
    if verdict.traced is None:
        refused = verdict.lowered[Warpgroup]
        assert (verdict.emulated is None) == (refused is None), verdict
        assert refused is None or str(refused) == str(verdict.emulated)
    return verdict


# --- little SMEM is left --------------------------------------------------------------


MOVES = {
    "roll": lambda x: jnp.roll(x, 3, -1),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "argmax": lambda x: jnp.argmax(x, -1),
    "argmax of all": jnp.argmax,
    "sum of all": jnp.sum,
    "sum of columns": lambda x: jnp.sum(x, 0),
    "sum of rows": lambda x: jnp.sum(x, -1),
    "transposed": lambda x: x.T,
    "in one axis": lambda x: x.reshape(-1),
    "twice": lambda x: jnp.concatenate([x, x], -1),
    "inner part": lambda x: x[..., 1:-1],
    "reversed": lambda x: x[::-1],
    "less the mean": lambda x: x - jnp.sum(x, 0, keepdims=True),
    "chosen": lambda x: jnp.take_along_axis(x, jnp.zeros_like(x, jnp.int32), -1),
    "elementwise": lambda x: x * 2,
}
SHAPES = [(128,), (64, 8), (129,), (33, 40), (5, 7), (1, 300), (8,)]


def nearly_full(move, shape, dtype, left_bytes, warpgroups=1):
    """A kernel whose arrays leave few bytes of SMEM."""
    out = jax.eval_shape(move, jax.ShapeDtypeStruct(shape, dtype))

    def body(x, o, filling):
        index = lax.axis_index("wg") if warpgroups > 1 else 0
        o[index] = move(x[...])

    threads = {"threads": {"wg": warpgroups}} if warpgroups > 1 else {}
    result = jax.ShapeDtypeStruct((warpgroups, *out.shape), out.dtype)
    filling = plgpu.SMEM((SMEM_BYTES - left_bytes,), jnp.int8)
    return everywhere.kernel(body, result, filling, **threads)()


@EXAMPLES
@hypothesis.given(
    st.sampled_from(sorted(MOVES)),
    st.sampled_from(SHAPES),
    st.sampled_from([jnp.float32, jnp.int8, jnp.bfloat16]),
    st.sampled_from([0, 16, 64, 128, 256, 512, 1024, 2048]),
    st.sampled_from([1, 1, 2]),
)
def test_what_moves_between_threads_needs_smem(name, shape, dtype, left, warpgroups):
    x = (np.arange(math.prod(shape)) % 7).reshape(shape).astype(jnp.dtype(dtype))
    require_agreement(nearly_full(MOVES[name], shape, dtype, left, warpgroups), x)


@pytest.mark.parametrize("name", ["roll", "cumsum"])
def test_the_emulator_refuses_what_has_no_room(name):
    x = np.zeros((64, 8), np.float32)
    full = nearly_full(MOVES[name], x.shape, x.dtype, 0)
    assert require_agreement(full, x).emulated is not None
    # Again: the answer is kept.
    with pytest.raises(errors.PallasGpuError):
        full(x)
    roomy = nearly_full(MOVES[name], x.shape, x.dtype, 1024)
    assert not require_agreement(roomy, x).refusals


ROUNDS = {"reversed": jnp.flip, "gathered": lambda x: x[(jnp.arange(64) * 7) % 64]}


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("name", ROUNDS)
def test_a_thousand_rounds_are_a_loop(name, semantics):
    x = np.arange(64.0 * 64, dtype=np.float32).reshape(64, 64)
    params = plgpu.CompilerParams(
        reduction_scratch_bytes=16, lowering_semantics=semantics
    )

    @plgpu.kernel(out_type=x, compiler_params=params)
    def kernel(x_ref, o_ref):
        o_ref[...] = ROUNDS[name](x_ref[...])

    with pytest.warns(errors.PerformanceWarning, match="a little at a time") as seen:
        (report,) = plgpu.offline.lower(kernel, x, target="sm_90a")
    assert "test_doubtful_kernels.py" in str(seen[0].message)
    assert "1024 rounds" in str(seen[0].message)
    assert len(report.mlir) < 200_000
    np.testing.assert_array_equal(kernel(x), ROUNDS[name](x))


@pytest.mark.parametrize("semantics", BOTH)
@refused
def test_a_hint_names_no_scratch_that_does_not_fit(semantics):
    x = np.zeros((64, 128), np.float32)
    full = nearly_full(MOVES["roll"], x.shape, x.dtype, 24, warpgroups=2)
    under(semantics, full)(x)


@everywhere.gives(
    [(np.arange(16 * 512) % 23).astype(np.float32).reshape(16, 512)],
    lambda x: x.sum(0),
    compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=2048),
    semantics=[Lane],
)
def test_a_reduction_of_many_columns_takes_rounds(x_ref, o_ref):
    """Under Lane semantics, whose default layout divides columns among the warps."""

    o_ref[...] = x_ref[...].sum(0)


# --- starts that are known at run time ------------------------------------------------

STARTS = {
    "as it is": lambda i: i,
    "times 2": lambda i: i * 2,
    "times 4": lambda i: i * 4,
    "times 8": lambda i: i * 8,
    "promised": lambda i: plgpu.multiple_of(i * 8, 4),
    "sum": lambda i: i * 4 + 2,
    "chosen": lambda i: jnp.where(i > 0, i * 4, 8),
}


@EXAMPLES
@hypothesis.given(
    st.sampled_from(sorted(STARTS)),
    st.sampled_from([jnp.int8, jnp.bfloat16, jnp.float32]),
    st.sampled_from([8, 64, 128]),
    st.sampled_from([1, 2]),
)
def test_words_of_narrow_elements(name, dtype, n, rank):
    def body(at, o, inbox, full):
        c = lax.axis_index("c")
        part = plgpu.ds(STARTS[name](at[0]), n)
        ref = inbox.at[part] if rank == 1 else inbox.at[:, part]
        plgpu.async_store_smem(
            jnp.ones(ref.shape, dtype), ref, full, cluster_idx=1 - c, cluster_dim="c"
        )
        plgpu.barrier_wait(full)
        o[c] = at[0]

    shape = (256,) if rank == 1 else (4, 256)
    out = jax.ShapeDtypeStruct((2,), jnp.int32)
    scratch = plgpu.SMEM(shape, dtype), plgpu.Barrier()
    kernel = everywhere.kernel(body, out, *scratch, cluster={"c": 2})
    require_agreement(kernel(), np.array([8], np.int32))


@EXAMPLES
@hypothesis.given(
    st.sampled_from(sorted(STARTS)),
    st.sampled_from([jnp.int8, jnp.bfloat16, jnp.float32]),
    st.sampled_from([5, 8, 32, 64]),
    st.booleans(),
    st.sampled_from([(), (plgpu.TilingTransform((8, 32)),)]),
    st.integers(0, 9),
)
def test_copies_from_any_start(name, dtype, n, store, transforms, i):
    hypothesis.assume(not transforms or n % 32 == 0)

    def body(x, at, o, tile, full):
        part = plgpu.ds(STARTS[name](at[0]), n)
        if store:
            tile[...] = x[:, :n]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, o.at[:, part])
            plgpu.wait_smem_to_gmem(0)
        else:
            plgpu.copy_gmem_to_smem(x.at[:, part], tile, full)
            plgpu.barrier_wait(full)
            o[:, :n] = tile[...]

    x = (np.arange(2048) % 97).reshape(8, 256).astype(jnp.dtype(dtype))
    tile = plgpu.SMEM((8, n), dtype, transforms=transforms)
    make = everywhere.kernel(body, x, tile, plgpu.Barrier())
    kernel = make(plgpu.InterpretParams(partial_results=True))
    require_agreement(kernel, x, np.array([i], np.int32))


@pytest.mark.parametrize("copies, maps", [(120, 120), (300, 284)])
def test_kernels_have_as_many_tensor_maps_as_their_parameters_hold(copies, maps):
    """Copies of one row are alike up to the width: they need no map of their own."""

    def body(x, o, full, *tiles):
        for k in range(copies):
            rows, tile = plgpu.ds(0, 1 + k // 16), tiles[k % 16]
            part = x.at[rows, plgpu.ds(0, tile.shape[1])]
            plgpu.copy_gmem_to_smem(part, tile.at[rows], full)
            plgpu.barrier_wait(full)
        o[...] = x[0, 0]

    tiles = [plgpu.SMEM((20, n), jnp.uint8) for n in range(16, 272, 16)]
    kernel = everywhere.kernel(body, np.zeros((), np.uint8), plgpu.Barrier(), *tiles)
    # What is counted are the maps of the whole kernel.
    verdict = require_agreement(kernel(), np.zeros((64, 512), np.uint8))
    assert bool(verdict.refusals) is (maps > 255)
    for error in verdict.refusals:
        assert isinstance(error, errors.OutOfResources)
        assert error.what.startswith("kernel body: its copies have too many")
        assert "(body)" in error.where
        assert error.got == maps
        assert "at most 255" in error.expected
