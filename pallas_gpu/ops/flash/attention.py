# SPDX-License-Identifier: Apache-2.0
"""Attention: its arguments, and the choice of Hopper's or Blackwell's kernel."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch, errors, expect
from pallas_gpu.ops import targets
from pallas_gpu.ops.flash import narrow, operands
from pallas_gpu.ops.flash.backward import derivatives
from pallas_gpu.ops.flash.backward.config import AttentionBackwardConfig
from pallas_gpu.ops.flash.config import AttentionConfig, BlackwellAttentionConfig
from pallas_gpu.ops.flash.forward import heuristic
from pallas_gpu.ops.flash.masks import Mask, Scores
from pallas_gpu.ops.flash.problem import APPROXIMATE, Operands, Problem
from pallas_gpu.ops.rules import Array, Factor, Interpret, aligned, vary_alike

_BLACKWELL_HEAD_DIMS = 64, 128


@expect.arguments()
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    causal: bool = False,
    sm_scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    align: Literal["start", "end"] = "start",
    soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    q_scale: Factor = None,
    k_scale: Factor = None,
    v_scale: Factor = None,
    out_dtype: Any = None,
    return_logsumexp: bool = False,
    deterministic: bool = False,
    config: AttentionConfig | BlackwellAttentionConfig | None = None,
    backward_config: AttentionBackwardConfig | None = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> Any:
    """Computes `softmax(sm_scale * q @ k.T + bias) @ v` for each head.

    Since: sm_90a. Issued by: the host; composes with `jax.jit` and `jax.vmap`, and on
    Hopper with `jax.grad`: q, k, v and bias have derivatives, also through logsumexp;
    operands of float8 have none. With a bias, derivatives are deterministic.

    The kernel is that of the configuration; without one, that of the target in
    `compiler_params`, or else of the attached GPU. Blackwell's takes `causal` and
    `sm_scale` alone of the options of the mask and of the scores.

    Blocks of K and V that a mask hides from a tile of Q are not read. A row that sees
    nothing gives zeros, and -inf as logsumexp.

    Args:
      q: (batch, q_len, heads, head_dim), float16, bfloat16 or float8_e4m3fn; head_dim
        up to 256, on Blackwell 64 or 128. Those that are not multiples of 16, or of 32
        in float8, are copied.
      k, v: (batch, kv_len, kv_heads, head_dim), of the same type; v may have another
        head_dim. Each head of K and V serves heads / kv_heads consecutive heads of Q.
      bias: added to the scores: (batch, heads, q_len, kv_len), 1 in place of any of
        them; float32, float16 or bfloat16. Where it is -inf, a row does not see.
      causal: row i of Q sees rows 0 to i of K and V, also where the lengths differ.
      sm_scale: positive factor of the scores; default: 1 / sqrt(head_dim).
      window: (left, right): row i sees rows i - left to i + right. None for one of them
        is without a bound; one integer is both.
      align: for `causal`, `window` and ALiBi. "start": row i of Q is at position i of K
        and V; "end": the last row of Q is at their last position.
      soft_cap: c makes of the scaled scores c * tanh(scores / c), before the bias.
      alibi_slopes: (heads,) or (batch, heads): a slope times the distance of the
        positions is subtracted from the scores.
      q_segment_ids, kv_segment_ids: (batch, q_len), (batch, kv_len), int32: a row sees
        rows with its own id. Where ids are sorted, no block of others is read.
      q_lengths, kv_lengths: (batch,), int32: rows of each sequence that exist; K and V
        behind them have to be finite.
      cu_seqlens_q, cu_seqlens_kv: (sequences + 1,), int32: the sequences are packed: q,
        k, v and the result are (tokens, heads, head_dim), and sequence i has the tokens
        cu_seqlens[i] to cu_seqlens[i + 1], which is excluded. The first is 0, the last
        is the number of tokens.
      q_scale, k_scale, v_scale: factors that make of float8 operands the numbers they
        stand for: positive numbers, or float32 of shape (), (1,), (heads,) or (batch,
        heads), with kv_heads for those of K and V. Default: 1.
      out_dtype: of the result: bfloat16, the default, or float16 for operands of
        float8; else that of q.
      return_logsumexp: also returns the logarithm of the sums of exponentials.
      deterministic: the derivatives are the same, to the bit, in each run. The result
        always is.
      config: tile sizes and schedule; default: chosen by target, head_dim and mask.
      backward_config: tile sizes and schedule of the derivatives; default: chosen by
        head_dim.
      compiler_params: see `kernel`; default: approximate exponentials (`approx_math`).
      interpret: see `kernel`.

    Returns:
      (batch, q_len, heads, v's head_dim) of `out_dtype`. Scores, softmax and sums are
      float32; probabilities are rounded to the type of q before the product with V. The
      tensor core's sums of float8 products have fewer bits than float32.
      With `return_logsumexp` a pair: the second is float32, (batch, heads, q_len), or
      (heads, tokens) of packed sequences.

    Raises:
      ShapeError, DTypeError: operands that do not match each other.
      ArgumentError: a factor that is not positive; options that exclude each other; a
        config that needs more registers than there are, or is for another target.
      UnsupportedError: an option that the kernel for Blackwell does not have, or, where
        derivatives are asked for, one that the backward pass does not have.
      DifferentiationError: the derivative of another operand than q, k and v.
      OutOfResources: a config that needs more SMEM, or TMEM, than there is.

    Example:
      >>> out = ops.attention(q, k, v, causal=True, window=(1023, 0))
    """
    packed = cu_seqlens_q is not None or cu_seqlens_kv is not None
    operands.check_matrices(q, k, v, packed)
    out_dtype = operands.result_dtype(q.dtype, out_dtype)
    scales = operands.scales(q, k, q_scale, k_scale, v_scale)
    given = Operands(
        *(q, k, v, bias, alibi_slopes, scales, q_segment_ids, kv_segment_ids),
        *(q_lengths, kv_lengths, cu_seqlens_q, cu_seqlens_kv),
    )
    x = operands.take(given, packed)
    scores = operands.make_scores(x, sm_scale, soft_cap)
    head_dim, v_dim = q.shape[-1], v.shape[-1]
    ragged = packed or x.q_lengths is not None
    mask = operands.make_mask(causal, window, align, x.q_ids is not None, ragged)
    chosen = _chosen(config, compiler_params, head_dim)
    if isinstance(chosen, BlackwellAttentionConfig):
        _check_for_blackwell(head_dim, v_dim, mask, scores, return_logsumexp)
    depth = operands.HEAD_DIM_MULTIPLE
    if narrow.is_narrow(q.dtype):
        _check_narrow(chosen, packed)
        depth = narrow.DEPTH
    deep = [aligned(y, depth) for y in (q, k)]
    x = x._replace(q=deep[0], k=deep[1], v=aligned(v, operands.HEAD_DIM_MULTIPLE))
    params = compiler_params or APPROXIMATE
    if isinstance(chosen, BlackwellAttentionConfig):
        params = dataclasses.replace(params, target=arch.SM_100A.name)
    problem: Problem[Any] = Problem(
        *operands.sizes(x, packed),
        jnp.dtype(q.dtype),
        mask,
        scores,
        chosen,
        bias=None if bias is None else tuple(x.bias.shape),
        bias_dtype=None if bias is None else jnp.dtype(bias.dtype),
        packed=packed,
        logsumexp=return_logsumexp,
        deterministic=deterministic,
        backward=backward_config,
        out_dtype=out_dtype,
        compiler_params=params,
        interpret=interpret,
    )
    if isinstance(chosen, AttentionConfig):
        if config is None:
            chosen = heuristic.configured(problem)
            problem = dataclasses.replace(problem, config=chosen)
        heuristic.check_registers(problem)
    out, logsumexp = derivatives.differentiable(problem, vary_alike(x))
    out = out[..., :v_dim] if v_dim < out.shape[-1] else out
    return (out, logsumexp) if return_logsumexp else out


def _chosen(
    config: AttentionConfig | BlackwellAttentionConfig | None,
    compiler_params: plgpu.CompilerParams | None,
    head_dim: int,
) -> AttentionConfig | BlackwellAttentionConfig:
    """Returns the configuration, or any; its type says which kernel is meant."""
    if config is None:
        if targets.chosen(compiler_params).has(arch.Feature.TCGEN05):
            return BlackwellAttentionConfig.default(head_dim)
        return AttentionConfig()
    kinds = AttentionConfig, BlackwellAttentionConfig
    targets.require("attention", config, compiler_params, kinds)
    return config


def _check_for_blackwell(
    head_dim: int, v_dim: int, mask: Mask, scores: Scores, logsumexp: bool
) -> None:
    if head_dim not in _BLACKWELL_HEAD_DIMS or v_dim != head_dim:
        raise errors.ShapeError(
            "attention: this head_dim is not supported on Blackwell",
            expected="64 or 128, of v as of q and k",
            got=head_dim if v_dim == head_dim else f"{head_dim}, of v {v_dim}",
            hint="pad q, k and v with zeros, and pass sm_scale",
        )
    plain = mask in (Mask(), Mask(right=0)) and not scores.modifies
    if not plain or logsumexp:
        raise errors.UnsupportedError(
            "attention: this option is not supported on Blackwell",
            expected="causal and sm_scale alone",
            got=f"{mask}, {scores}, return_logsumexp={logsumexp}",
            hint="the kernel for Hopper takes all options: target='sm_90a' in "
            "compiler_params",
        )


def _check_narrow(config: Any, packed: bool) -> None:
    if packed or isinstance(config, BlackwellAttentionConfig):
        raise errors.UnsupportedError(
            "attention: float8 is not supported here",
            expected="a kernel for Hopper, and sequences of one length, or with "
            "q_lengths and kv_lengths",
            got="packed sequences" if packed else "a kernel for Blackwell",
            hint="convert the operands with astype(jnp.bfloat16)",
        )
    if config.keep_maxima:
        raise errors.ArgumentError(
            "attention: keep_maxima is not supported for float8",
            expected="keep_maxima=False",
            got="keep_maxima=True",
            hint="omit it: float8 has no room for probabilities above 1",
        )
    if config.block_kv % narrow.DEPTH:
        raise errors.ArgumentError(
            "attention: this block_kv is not supported for float8",
            expected=f"a multiple of {narrow.DEPTH}",
            got=f"block_kv={config.block_kv}",
            hint="leave out config",
        )
