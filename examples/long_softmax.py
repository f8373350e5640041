# SPDX-License-Identifier: Apache-2.0
"""Softmax of one long vector in one launch: its CTAs meet at barriers of the grid"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from examples import Case, normal

REGULAR = plgpu.SemaphoreType.REGULAR


def long_softmax(x: jax.Array, ctas: int) -> jax.Array:
    """Returns the softmax of x, (n,); n is a multiple of 128 * ctas.

    Each CTA reads its part once. No more CTAs than fit on the device at once: each
    waits for all others, for their maxima and for their sums.
    """
    part = x.size // ctas

    def body(x_ref, o_ref, maxima_ref, sums_ref):
        cta = lax.axis_index("cta")
        arrived, go = plgpu.get_global(REGULAR), plgpu.get_global(REGULAR((ctas,)))

        def meet() -> None:
            plgpu.semaphore_signal(arrived, memory_scope="gpu")

            @plgpu.when(cta == 0)
            def _():
                plgpu.semaphore_wait(arrived, ctas, memory_scope="gpu")
                signals = [plgpu.SemaphoreSignal(go.at[i]) for i in range(ctas)]
                plgpu.semaphore_signal_parallel(*signals)

            plgpu.semaphore_wait(go.at[cta], memory_scope="gpu")

        mine = plgpu.ds(cta * part, part)
        values = x_ref[mine]
        maxima_ref[cta] = jnp.max(values)
        meet()
        exponentials = jnp.exp(values - jnp.max(maxima_ref[...]))
        sums_ref[cta] = jnp.sum(exponentials)
        meet()
        o_ref[mine] = exponentials / jnp.sum(sums_ref[...])

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.GMEM((ctas,), x.dtype)] * 2,
        grid=(ctas,),
        grid_names=("cta",),
    )(x)


_X = 3 * normal(0, 8 * 1024)
CASES = [Case(lambda x: long_softmax(x, 8), jax.nn.softmax, (_X,), 1e-6)]
