# SPDX-License-Identifier: Apache-2.0
"""The product of a pair of CTAs for both packages; see `tensor_kernels`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.support.differential.tensor_kernels import tmem
from tests.support.tensor_pairs import PAIR, PairProduct

# Columns of float32 that fit the registers of a warpgroup.
_MOST_LOADED = 128


def product(case: PairProduct) -> tuple[Any, ...]:
    """How a product of one tile is made, and the types of its operands."""
    whole = case.whole
    args = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(whole.shapes, (case.a, case.b), strict=True)
    ]
    return functools.partial(_product, case), *args


def _product(case: PairProduct, names: Any, params: Any) -> Callable[..., Any]:
    def storage(dtype: Any) -> tuple[Any, ...]:
        columns = case.swizzle // jnp.dtype(dtype).itemsize
        return names.TilingTransform((8, columns)), names.SwizzleTransform(case.swizzle)

    def turned(ref: Any, stored: bool) -> Any:
        return names.transpose_ref(ref, (1, 0)) if stored else ref

    def body(a, b, out, a_smem, b_smem, acc, loaded, done, a_tmem=None):
        axes = int(case.a_stored), int(not case.b_stored)
        for src, dst, axis in zip((a, b), (a_smem, b_smem), axes, strict=True):
            names.copy_gmem_to_smem(
                src,
                dst,
                loaded,
                collective_axes="c",
                leader_tracked=names.CopyPartition.PARTITIONED(axis),
            )

        @names.when(lax.axis_index("c") == 0)
        def _():
            names.barrier_wait(loaded)

        # Only the addresses of the product matter of a left operand in TMEM.
        left = turned(a_smem, case.a_stored) if a_tmem is None else a_tmem
        names.tcgen05_mma(
            acc,
            left,
            turned(b_smem, case.b_stored),
            done,
            accumulate=False,
            collective_axis="c",
        )
        names.barrier_wait(done)
        if case.n <= _MOST_LOADED:
            rows = names.ds(lax.axis_index("c") * case.m, case.m)
            out[rows] = names.async_load_tmem(acc)

    a_shape, b_shape = case.shapes
    scratch = {
        "a_smem": names.SMEM(a_shape, case.a, transforms=storage(case.a)),
        "b_smem": names.SMEM(b_shape, case.b, transforms=storage(case.b)),
        "acc": tmem(names, (case.m, case.n), case.acc, packed=False, collective=True),
        "loaded": names.Barrier(num_arrivals=2),
        "done": names.Barrier(orders_tensor_core=True),
    }
    if case.a_in_tmem:
        scratch["a_tmem"] = tmem(
            names, (case.m, case.k), case.a, packed=True, collective=True
        )
    return names.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2 * case.m, case.n), case.acc),
        scratch_types=scratch,
        compiler_params=params,
        **PAIR,
    )
