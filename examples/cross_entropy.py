# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of logits with labels: one pass over rows that exceed the registers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from examples import Case, integers, normal

COLUMNS = 4096


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

    def body(logits_ref, labels_ref, loss_ref):
        def chunk(start, size, carry):
            top, total = carry
            x = logits_ref[0, plgpu.ds(start, size)].astype(jnp.float32)
            new_top = jnp.maximum(top, jnp.max(x))
            total = total * jnp.exp(top - new_top) + jnp.sum(jnp.exp(x - new_top))
            return new_top, total

        whole, rest = divmod(classes, COLUMNS)
        carry = jax.lax.fori_loop(
            0,
            whole,
            lambda i, carry: chunk(i * COLUMNS, COLUMNS, carry),
            (jnp.float32(-jnp.inf), jnp.float32(0)),
        )
        if rest:
            carry = chunk(whole * COLUMNS, rest, carry)
        top, total = carry
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
