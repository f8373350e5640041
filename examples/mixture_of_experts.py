# SPDX-License-Identifier: Apache-2.0
"""A layer of experts: each token goes to the best two, whose results are combined."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from examples import Case, normal
from pallas_gpu import ops

BEST = 2


def mixture_of_experts(
    x: jax.Array, router: jax.Array, w: jax.Array, gate: jax.Array, down: jax.Array
) -> jax.Array:
    """Returns the weighted sum of each token's best experts, in the type of x.

    The rows of the products are pairs of token and expert, in the order of the experts;
    the first product reads the tokens where they are.

    Args:
      x: (tokens, d).
      router: (d, experts).
      w, gate: (experts, d, hidden); the hidden layer is silu(x @ gate) * (x @ w).
      down: (experts, hidden, d).
    """
    weights, expert = _routes(x, router)
    order = jnp.argsort(expert.ravel())
    sizes = jnp.bincount(expert.ravel(), length=router.shape[1])
    hidden = ops.ragged_dot(x, w, sizes, rows=order // BEST, gate=gate)
    of_pairs = ops.ragged_dot(hidden, down, sizes)
    # From the order of the experts back to that of the tokens.
    of_tokens = of_pairs[jnp.argsort(order)].reshape(*expert.shape, -1)
    return jnp.einsum("tbd,tb->td", of_tokens, weights).astype(x.dtype)


def _routes(x: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns weights and numbers of each token's best experts: (tokens, BEST)."""
    logits = jnp.matmul(x, router, preferred_element_type=jnp.float32)
    best, expert = jax.lax.top_k(logits, BEST)
    return jax.nn.softmax(best, axis=-1), expert


def _every_expert(x, router, w, gate, down):
    """Computes all experts for all tokens, in float32."""
    weights, expert = _routes(x, router)
    x, w, gate, down = (a.astype(jnp.float32) for a in (x, w, gate, down))
    hidden = jax.nn.silu(jnp.einsum("td,edh->teh", x, gate))
    hidden = hidden * jnp.einsum("td,edh->teh", x, w)
    results = jnp.einsum("teh,ehd->ted", hidden, down)
    chosen = jnp.take_along_axis(results, expert[..., None], axis=1)
    return jnp.einsum("tbd,tb->td", chosen, weights)


def _reference(*args):
    return _every_expert(*args).astype(args[0].dtype)


def _loss(f, x, router, w, gate, down):
    return jnp.sum(f(x, router, w, gate, down).astype(jnp.float32) ** 2)


_BF16 = jnp.bfloat16
_ARGS = (
    normal(0, 50, 64, dtype=_BF16),
    normal(1, 64, 4, dtype=_BF16),
    normal(2, 4, 64, 128, dtype=_BF16) / 8,
    normal(3, 4, 64, 128, dtype=_BF16) / 8,
    normal(4, 4, 128, 64, dtype=_BF16) / 12,
)
CASES = [
    Case(mixture_of_experts, _reference, _ARGS, 3e-2),
    Case(
        jax.grad(functools.partial(_loss, mixture_of_experts), argnums=(2, 4)),
        jax.grad(functools.partial(_loss, _every_expert), argnums=(2, 4)),
        _ARGS,
        0.3,
    ),
]
