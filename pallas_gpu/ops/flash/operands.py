# SPDX-License-Identifier: Apache-2.0
"""The arrays of attention: checks, and their normal form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors
from pallas_gpu.ops.flash import narrow
from pallas_gpu.ops.flash.masks import Mask, Scores
from pallas_gpu.ops.flash.problem import Operands
from pallas_gpu.ops.rules import check_array, no_types, positive, result_type

_LARGEST_HEAD_DIM = 256
# The tensor core takes 16 elements of a row of Q and of K at a time.
HEAD_DIM_MULTIPLE = 16
_BIAS_DTYPES = jnp.float32, jnp.float16, jnp.bfloat16
_HALVES = jnp.float16, jnp.bfloat16


def factor(
    who: str, name: str, value: Any, shapes: Sequence[tuple[int, ...]], each: str
) -> Any:
    """Returns a factor: a positive number, by default 1.0, or float32 of some shape."""
    if value is None:
        return 1.0
    if hasattr(value, "shape"):
        check_array(who, name, value, shapes, each, jnp.float32)
        return value
    positive(who, name, value, "negate q, or v, instead")
    return float(value)


# --- Q, K and V -----------------------------------------------------------------------


def check_matrices(q: Any, k: Any, v: Any, packed: bool) -> None:
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    rank = 3 if packed else 4
    fit = all(len(s) == rank and min(s) > 0 for s in shapes) and (
        shapes[1][:-1] == shapes[2][:-1]
        and shapes[0][:-3] == shapes[1][:-3]
        and shapes[0][-1] == shapes[1][-1]
        and shapes[0][-2] % shapes[1][-2] == 0
    )
    if not fit:
        rows = "tokens" if packed else "batch, {}_len"
        raise errors.ShapeError(
            "attention: the shapes do not match",
            expected=f"q ({rows.format('q')}, heads, head_dim), k "
            f"({rows.format('kv')}, kv_heads, head_dim), v of k's shape up to its own "
            "head_dim, heads a multiple of kv_heads",
            got="{}, {} and {}".format(*shapes),
            hint="heads come before head_dim, the sequence before heads",
        )
    for name, head_dim in (("head_dim", shapes[0][-1]), ("v's head_dim", v.shape[-1])):
        if head_dim > _LARGEST_HEAD_DIM:
            raise errors.ShapeError(
                f"attention: this {name} is not supported",
                expected=f"1 to {_LARGEST_HEAD_DIM}",
                got=head_dim,
                hint="divide it among several heads",
            )
    dtypes = {jnp.dtype(x.dtype) for x in (q, k, v)}
    if len(dtypes) > 1 or not (q.dtype in _HALVES or narrow.is_narrow(q.dtype)):
        wanted = "float16, bfloat16 or float8_e4m3fn for q, k and v"
        raise no_types("attention", wanted, q, k, v)


def result_dtype(dtype: Any, out_dtype: Any) -> Any:
    of_narrow = jnp.bfloat16, jnp.float16
    allowed = [*map(jnp.dtype, of_narrow if narrow.is_narrow(dtype) else (dtype,))]
    if out_dtype is None:
        return allowed[0]
    hint = "omit out_dtype, and convert the result with astype"
    return result_type("attention", out_dtype, allowed, hint)


def scales(q: Any, k: Any, q_scale: Any, k_scale: Any, v_scale: Any) -> Any:
    """Returns factors of the scores and of the result, or None.

    Returns:
      (batch or 1, heads, 2) float32; heads are those of Q.
    """
    given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    if not narrow.is_narrow(q.dtype):
        for name, value in given.items():
            if value is not None:
                raise errors.ArgumentError(
                    f"attention: {name} without operands of float8",
                    expected="None, or q, k and v of float8_e4m3fn",
                    got=f"{name} and q of {jnp.dtype(q.dtype).name}",
                    hint="sm_scale is a factor of the scores",
                )
        return None
    batch, heads, kv_heads = q.shape[0], q.shape[-2], k.shape[-2]
    found = []
    for (name, value), n in zip(
        given.items(), (heads, kv_heads, kv_heads), strict=True
    ):
        each = "one for all, for each head, or for each batch and head"
        shapes = (), (1,), (n,), (1, n), (batch, n)
        array = jnp.asarray(factor("attention", name, value, shapes, each), jnp.float32)
        batches = array.shape[0] if array.ndim == 2 else 1
        array = jnp.broadcast_to(jnp.atleast_2d(array), (batches, n))
        found.append(jnp.repeat(array, heads // n, axis=1))
    of_q, of_k, of_v = found
    return jnp.stack(jnp.broadcast_arrays(of_q * of_k, of_v), axis=2)


def sizes(x: Operands, packed: bool) -> tuple[int, int, int, int, int, int, int]:
    batch = x.q_starts.shape[0] - 1 if packed else x.q.shape[0]
    q_len, heads, head_dim = x.q.shape[-3:]
    kv_len, kv_heads, v_dim = x.v.shape[-3:]
    return batch, q_len, kv_len, heads, kv_heads, head_dim, v_dim


# --- the options ----------------------------------------------------------------------


def make_mask(
    causal: bool, window: Any, align: str, segments: bool, ragged: bool
) -> Mask:
    left, right = bounds(window)
    if causal:
        right = 0 if right is None else min(right, 0)
    return Mask(left, right, align == "end", segments, ragged)


def make_scores(x: Operands, sm_scale: Any, soft_cap: Any) -> Scores:
    if sm_scale is None:
        sm_scale = 1 / math.sqrt(x.q.shape[-1])
    positive("attention", "sm_scale", sm_scale, "negate q instead")
    positive("attention", "soft_cap", soft_cap, "None is without a cap")
    soft_cap = None if soft_cap is None else float(soft_cap)
    has_bias, has_slopes = x.bias is not None, x.slopes is not None
    return Scores(float(sm_scale), soft_cap, bias=has_bias, alibi=has_slopes)


def bounds(window: Any) -> tuple[int | None, int | None]:
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    fit = len(sides) == 2 and all(
        n is None or (isinstance(n, int | np.integer) and 0 <= n < 2**30) for n in sides
    )
    if not fit or any(isinstance(n, bool) for n in sides):
        raise errors.ArgumentError(
            "attention: invalid value of window",
            expected="(left, right), or one integer for both; 0 to 2**30 - 1, or None",
            got=window,
            hint="None is without a bound; (1023, 0) sees 1024 columns",
        )
    left, right = (None if n is None else int(n) for n in sides)
    return left, right


def take(x: Operands, packed: bool) -> Operands:
    _pair("q_segment_ids", x.q_ids, "kv_segment_ids", x.kv_ids)
    _pair("cu_seqlens_q", x.q_starts, "cu_seqlens_kv", x.kv_starts)
    if packed:
        return _take_packed(x)
    batch, q_len, heads, _ = x.q.shape
    kv_len = x.k.shape[1]
    if x.bias is not None:
        x = x._replace(bias=_bias(x.bias, (batch, heads, q_len, kv_len)))
    x = _with_slopes(x, batch)
    if x.q_ids is not None:
        each = "one for each position"
        _check_integers("q_segment_ids", x.q_ids, (batch, q_len), each)
        _check_integers("kv_segment_ids", x.kv_ids, (batch, kv_len), each)
    if x.q_lengths is not None or x.kv_lengths is not None:
        given = []
        for name, lengths, full in (
            ("q_lengths", x.q_lengths, q_len),
            ("kv_lengths", x.kv_lengths, kv_len),
        ):
            if lengths is None:
                lengths = jnp.full((batch,), full, jnp.int32)
            _check_integers(name, lengths, (batch,), "one for each sequence")
            # A length that is too large would be read from the next sequence.
            given.append(jnp.clip(lengths, 0, full))
        x = x._replace(q_lengths=given[0], kv_lengths=given[1])
    return x


def _take_packed(x: Operands) -> Operands:
    others = {
        "bias": x.bias,
        "q_segment_ids": x.q_ids,
        "q_lengths": x.q_lengths,
        "kv_lengths": x.kv_lengths,
    }
    for name, value in others.items():
        if value is not None:
            raise errors.ArgumentError(
                f"attention: {name} beside cu_seqlens_q",
                expected="None",
                got=f"an array of shape {tuple(value.shape)}",
                hint="packed sequences have their lengths in cu_seqlens_q and "
                "cu_seqlens_kv; a bias needs a batch dimension",
            )
    sequences = x.q_starts.shape[0] - 1 if x.q_starts.ndim == 1 else 0
    for name, starts in (("cu_seqlens_q", x.q_starts), ("cu_seqlens_kv", x.kv_starts)):
        each = "one for each sequence, and the end of the last one"
        _check_integers(name, starts, (max(sequences, 1) + 1,), each)
    return _with_slopes(x, sequences)


def _pair(one: str, a: Any, other: str, b: Any) -> None:
    if (a is None) != (b is None):
        given, missing = (one, other) if b is None else (other, one)
        raise errors.ArgumentError(
            f"attention: {given} without {missing}",
            expected=f"both {one} and {other}, or none of them",
            got=f"{missing}=None",
            hint=f"pass {missing}, too; it may be the same array",
        )


def _bias(bias: Any, full: tuple[int, ...]) -> Any:
    shape = tuple(bias.shape)
    fit = len(shape) == 4 and all(
        n in (1, m) for n, m in zip(shape, full, strict=False)
    )
    if not fit:
        raise errors.ShapeError(
            "attention: the shape of bias does not match",
            expected=f"{full}, or 1 in place of any of them",
            got=shape,
            hint="insert dimensions of 1 with bias[None]",
        )
    if bias.dtype not in _BIAS_DTYPES:
        raise errors.DTypeError(
            "attention: this element type of bias is not supported",
            expected="float32, float16 or bfloat16",
            got=jnp.dtype(bias.dtype).name,
            hint="make a mask a bias with jnp.where(mask, 0.0, -jnp.inf)",
        )
    # Columns of a block arrive by one copy.
    return jnp.broadcast_to(bias, (*shape[:3], full[3]))


def _with_slopes(x: Operands, batch: int) -> Operands:
    if x.slopes is None:
        return x
    heads, slopes = x.q.shape[-2], x.slopes.astype(jnp.float32)
    shapes = (heads,), (1, heads), (batch, heads)
    each = "one slope for each head of q"
    check_array("attention", "alibi_slopes", slopes, shapes, each, jnp.float32)
    return x._replace(slopes=slopes.reshape(-1, heads))


def _check_integers(name: str, x: Any, shape: tuple[int, ...], each: str) -> None:
    check_array("attention", name, x, [shape], each, jnp.int32)
