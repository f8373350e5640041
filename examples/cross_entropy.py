# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of logits with labels: one pass over rows that exceed the registers.

Each of 128 parts of a row has a maximum and a sum of its own, which only the end
combines: until then no thread waits for another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, integers, normal

COLUMNS, PARTS = 4096, 128


def cross_entropy(
    logits: jax.Array, labels: jax.Array, *, approx_math: bool = False
) -> jax.Array:
    """Returns logsumexp(row) - row[label] for each row, in float32.

    Args:
      logits: (rows, classes).
      labels: (rows,), int32.
      approx_math: use the hardware's approximations of exp and log.
    """
    rows, classes = logits.shape
    whole, rest = divmod(classes, COLUMNS)

    def body(logits_ref, labels_ref, loss_ref):
        def columns(start, size):
            return logits_ref[0, plgpu.ds(start, size)].astype(jnp.float32)

        def chunk(i, carry):
            tops, totals = carry
            # A thread loads four columns at once; each has its own maximum and sum.
            x = columns(i * COLUMNS, COLUMNS).reshape(-1, PARTS, 4)
            new_tops = jnp.maximum(tops, jnp.max(x, axis=(0, 2)))
            terms = jnp.sum(jnp.exp(x - new_tops[:, None]), axis=(0, 2))
            return new_tops, totals * jnp.exp(tops - new_tops) + terms

        lowest = jnp.full(PARTS, jnp.finfo(jnp.float32).min)
        tops, totals = jax.lax.fori_loop(
            0, whole, chunk, (lowest, jnp.zeros(PARTS, jnp.float32)), unroll=2
        )
        x = columns(whole * COLUMNS, rest) if rest else jnp.full(1, -jnp.inf)
        top = jnp.maximum(jnp.max(tops), jnp.max(x))
        total = jnp.sum(totals * jnp.exp(tops - top)) + jnp.sum(jnp.exp(x - top))
        picked = logits_ref[0, labels_ref[0]].astype(jnp.float32)
        loss_ref[0] = top + jnp.log(total) - picked

    def spec(*block):
        return plgpu.BlockSpec(
            block, lambda i: (i, 0)[: len(block)], memory_space=plgpu.GMEM
        )

    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.float32),
        grid=(rows,),
        in_specs=[spec(1, classes), spec(1)],
        out_specs=spec(1),
        compiler_params=plgpu.CompilerParams(approx_math=approx_math),
    )(logits, labels)


def reference(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return jax.nn.logsumexp(logits, 1) - picked


_LABELS = integers(1, 0, 10000, 4)
CASES = [Case(cross_entropy, reference, (normal(0, 4, 10000), _LABELS))]
