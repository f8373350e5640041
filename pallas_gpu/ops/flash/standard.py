# SPDX-License-Identifier: Apache-2.0
"""Attention with the signature of `jax.nn.dot_product_attention`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.flash import narrow
from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.flash.config import AttentionConfig, BlackwellAttentionConfig
from pallas_gpu.ops.rules import Array, Interpret


@expect.arguments(
    implementation=expect.refused(
        None, "call jax.nn.dot_product_attention for XLA's or cuDNN's implementation"
    )
)
def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool = False,
    config: AttentionConfig | BlackwellAttentionConfig | None = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> Any:
    """Computes attention; takes the arguments of `jax.nn.dot_product_attention`.

    Since: sm_90a. Issued by: the host; composes with `jax.jit` and `jax.vmap`; see
    `attention`, which computes it.

    Rows that see nothing give zeros, where JAX's give the mean of value.

    Args:
      query: (batch, q_len, heads, head_dim), or without batch; float16 or bfloat16.
      key, value: (batch, kv_len, kv_heads, head_dim), or without batch.
      bias: added to the scaled scores; it broadcasts to (batch, heads, q_len, kv_len).
      mask: bools of such a shape: where a row sees.
      scale: positive factor of the scores; default: 1 / sqrt(head_dim).
      is_causal: row i of query sees rows 0 to i of key and value.
      query_seq_lengths, key_value_seq_lengths: (batch,), int32.
      local_window_size: (left, right), or one integer for both: row i sees rows
        i - left to i + right.
      implementation: None: this package's.
      return_residual: also returns the logarithm of the sums of exponentials.
      config, compiler_params, interpret: see `attention`.

    Returns:
      An array of query's shape and type; with `return_residual` a pair, the second of
      shape (batch, q_len, heads), or without batch, of the same type.

    Raises:
      ShapeError, DTypeError: operands that do not match each other.
      ArgumentError: a scale that is not positive, or an invalid window.
      UnsupportedError: an implementation; see also `attention`.

    Example:
      >>> out = ops.dot_product_attention(query, key, value, is_causal=True)
    """
    del implementation
    batched = _check_ranks(query, key, value)
    if narrow.is_narrow(query.dtype):
        raise errors.DTypeError(
            "dot_product_attention: float8 is not supported",
            expected="float16 or bfloat16",
            got=jnp.dtype(query.dtype).name,
            hint="ops.attention takes float8 with scales",
        )
    if not batched:
        query, key, value = query[None], key[None], value[None]
    found = attention(
        *(query, key, value),
        bias=_bias(query.dtype, _of_rank_4("bias", bias), _of_rank_4("mask", mask)),
        causal=is_causal,
        sm_scale=scale,
        window=local_window_size,
        q_lengths=query_seq_lengths,
        kv_lengths=key_value_seq_lengths,
        return_logsumexp=return_residual,
        config=config,
        compiler_params=compiler_params,
        interpret=interpret,
    )
    if not return_residual:
        return found if batched else found[0]
    out, logsumexp = found
    residual = jnp.swapaxes(logsumexp, 1, 2).astype(out.dtype)
    return (out, residual) if batched else (out[0], residual[0])


def _check_ranks(query: Any, key: Any, value: Any) -> bool:
    ranks = {query.ndim, key.ndim, value.ndim}
    if ranks in ({3}, {4}):
        return ranks == {4}
    raise errors.ShapeError(
        "dot_product_attention: the ranks do not match",
        expected="query, key and value (batch, length, heads, head_dim), or all "
        "without batch",
        got=f"{query.shape}, {key.shape} and {value.shape}",
        hint="insert dimensions of 1",
    )


def _of_rank_4(name: str, x: Any) -> Any:
    if x is None or x.ndim == 4:
        return x
    if x.ndim > 4:
        raise errors.ShapeError(
            f"dot_product_attention: {name} has too many dimensions",
            expected="a shape that broadcasts to (batch, heads, q_len, kv_len)",
            got=tuple(x.shape),
            hint="map over the others with jax.vmap",
        )
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _bias(dtype: Any, bias: Any, mask: Any) -> Any:
    """Returns both as a bias: -inf where a row does not see."""
    if mask is None:
        return bias
    if mask.dtype != jnp.bool_:
        raise errors.DTypeError(
            "dot_product_attention: mask is not of type bool",
            expected="bool: True where a row sees",
            got=jnp.dtype(mask.dtype).name,
            hint="pass what is to be added to the scores as bias",
        )
    if bias is None:
        bias = jnp.zeros((), dtype)
    return jnp.where(mask, bias, jnp.asarray(-jnp.inf, bias.dtype))
