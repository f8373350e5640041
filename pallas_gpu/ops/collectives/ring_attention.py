# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences that are divided among devices: K and V go round in a ring."""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.collectives.calls import Method, rotate
from pallas_gpu.ops.collectives.devices import AxisName, Group, varying
from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.rules import Array, Interpret, array, vary_alike


@expect.arguments()
def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    axis_name: AxisName,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    return_logsumexp: bool = False,
    method: Method = "lax",
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> Any:
    """Computes `attention` of a sequence of which each device has a part, in order.

    There are as many steps as devices. In each a device attends to the K and V that it
    has, combines the result with that of the steps before by their logsumexp, and sends
    K and V to the next device. The derivative goes the other way round.

    Since: sm_90a. Issued by: the host, in a function of `jax.shard_map` over all axes
    of its mesh; composes with `jax.jit` and `jax.grad`.

    Args:
      q: (batch, q_len, heads, head_dim), the device's rows, see `attention`.
      k, v: (batch, kv_len, kv_heads, head_dim), the device's rows.
      axis_name: name of an axis of the mesh, or a tuple of names.
      causal: a row sees the rows before it in the whole sequence, and itself; q and k
        have as many rows. The steps whose rows are all behind do nothing.
      sm_scale: see `attention`.
      return_logsumexp: also returns the logarithm of the sums of exponentials.
      method: of `rotate`. XLA runs the collective of `jax.lax`, "lax", while attention
        is computed, and a kernel before it.
      compiler_params, interpret: see `kernel`.

    Returns:
      (batch, q_len, heads, head_dim), of the type of q; with `return_logsumexp` a pair,
      as of `attention`.

    Raises:
      Errors as those of `attention` and `rotate`.
    """
    group = Group.along(axis_name)
    q, k, v = vary_alike(tuple(varying(x, group) for x in (q, k, v)))
    of_kernels: dict[str, Any] = {
        "compiler_params": compiler_params,
        "interpret": interpret,
    }

    def attend(k: Any, v: Any, causal: bool) -> tuple[jax.Array, jax.Array]:
        return attention(
            q, k, v,
            causal=causal, sm_scale=sm_scale, return_logsumexp=True, **of_kernels,
        )  # fmt: skip

    def step(carry: Any, i: Any) -> Any:
        k, v, *done = carry
        k, v = (rotate(x, axis_name, method=method, **of_kernels) for x in (k, v))
        if not causal:
            return (k, v, *merge(done, attend(k, v, False))), None
        # In step i these are the rows of the device i places before.
        sees = lax.le(i, group.me())
        done = lax.cond(
            sees,
            lambda done: merge(done, attend(k, v, False)),
            lambda done: tuple(done),
            tuple(done),
        )
        return (k, v, *done), None

    out, logsumexp = attend(k, v, causal)
    carry = k, v, out.astype(jnp.float32), logsumexp
    if group.size > 1:
        steps = np.arange(1, group.size, dtype=np.int32)
        carry, _ = lax.scan(step, carry, steps)
    _, _, out, logsumexp = carry
    out = out.astype(q.dtype)
    return (out, logsumexp) if return_logsumexp else out


def _pair(value: Any, what: str) -> Any:
    if expect.is_sequence(value) and len(value) == 2:
        return tuple(array(x, what) for x in value)
    hint = "attention(..., return_logsumexp=True) returns it"
    raise expect.wrong_type(what, "a pair", "a result and its logsumexp", value, hint)


# An annotation of a parameter, with its rule.
Pair = Annotated[Any, _pair]


@expect.arguments()
def merge(a: Pair, b: Pair) -> tuple[jax.Array, jax.Array]:
    """Combines attention to two sets of rows: results and their logsumexp.

    Each result is weighted by its share of the sum of exponentials.

    Since: any target. Issued by: the host.

    Args:
      a, b: pairs of (batch, q_len, heads, head_dim) and (batch, heads, q_len), as
        `attention(..., return_logsumexp=True)` returns; a row may see nothing in one of
        the sets, with -inf as its logsumexp.

    Returns:
      The pair of both sets together, in float32.

    Raises:
      ArgumentTypeError: not pairs of arrays.
      ShapeError: results and logsumexps do not match.
    """
    (x, lse_x), (y, lse_y) = a, b
    rows = x.ndim == 4 and (x.shape[0], x.shape[2], x.shape[1])
    if x.shape != y.shape or not rows == lse_x.shape == lse_y.shape:
        raise errors.ShapeError(
            "merge: results and logsumexps do not match",
            expected="(batch, q_len, heads, head_dim) and (batch, heads, q_len), twice",
            got=" and ".join(str(tuple(z.shape)) for z in (x, lse_x, y, lse_y)),
            hint="attention(..., return_logsumexp=True) returns them",
        )
    most = lax.stop_gradient(jnp.maximum(lse_x, lse_y))
    finite = jnp.where(jnp.isfinite(most), most, 0)
    weights = [jnp.exp(lse - finite) for lse in (lse_x, lse_y)]
    total = weights[0] + weights[1]
    some = jnp.where(total > 0, total, 1)
    shares = [jnp.swapaxes(w / some, 1, 2)[..., None] for w in weights]
    out = sum(
        part.astype(jnp.float32) * share
        for part, share in zip((x, y), shares, strict=True)
    )
    return out, finite + jnp.log(jnp.where(total > 0, total, 0))
