# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the tensor core: exact products, sums with its limited precision.

16-bit types: products are exact in float32 and are summed there. The order and rounding
of the hardware's sums differ; results agree up to float32's precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

# PTX ISA, "Data types" of wgmma: .tf32 has 10 bits of mantissa; float32 has 23.
_TF32_MASK = np.uint32(0xFFFF_E000)
# PTX ISA, wgmma.mma_async: K of one instruction is 32 bytes.
_F16_K_STEP = 16
_F8_K_STEP = 32
# DeepSeek-V3 technical report (arXiv 2412.19437), section 3.5.2: the fp8 tensor cores
# of Hopper shift all products of an instruction to their largest exponent, keep 14 bits
# and truncate the rest. One of the 14 is the integer bit.
_F8_FRACTION_BITS = 13
_F8_UNIT = np.float32(2.0**-_F8_FRACTION_BITS)
_F8_MASK = np.uint32((0xFFFF_FFFF << (23 - _F8_FRACTION_BITS)) & 0xFFFF_FFFF)
_EXPONENT_MASK = np.uint32(0x7F80_0000)
# OpenBLAS (interface/gemm.c: SMP_THRESHOLD_MIN times GEMM_MULTITHREAD_THRESHOLD) runs a
# product of at most so many multiplications in the calling thread. Larger ones wake its
# other threads, which wait by spinning: beside other work that takes 100 times as long.
_ONE_THREAD_TERMS = 65536 * 4
# Few enough for a core's cache, and enough to outweigh NumPy's calls.
_PRODUCTS_AT_ONCE = 65536
# Products of int8 are below 2**14, of uint8 below 2**16: so many sum up exactly in
# float32.
_EXACT_INT8_TERMS, _EXACT_UINT8_TERMS = 1024, 256

_FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))


def accumulate(
    acc: np.ndarray, a: np.ndarray, b: np.ndarray, *, truncates: bool = True
) -> None:
    """Adds a @ b to acc.

    Args:
      acc: (M, N) in float32, float16 or int32.
      a: (M, K) elements.
      b: (K, N) elements.
      truncates: whether sums of 8-bit floats keep few bits, as on Hopper; it is not
        known of later tensor cores.
    """
    if a.dtype.kind in "iu":
        acc += _int8_product(a, b)
    elif a.dtype in _FLOAT8 and truncates:
        acc[...] = _float8(acc, a, b)
    elif acc.dtype == np.float16:
        acc[...] = _float16(acc, widen(a), widen(b))
    else:
        acc += product(widen(a), widen(b))


def widen(x: np.ndarray) -> np.ndarray:
    """Returns an operand as the tensor core reads it, in float32."""
    if x.dtype == np.float32:
        bits = np.ascontiguousarray(x).view(np.uint32) & _TF32_MASK
        return bits.view(np.float32)
    if x.dtype == np.float16 or x.dtype in _FLOAT8:
        # NumPy's own conversions take longer.
        words = x.view(f"u{x.dtype.itemsize}")
        return _table(x.dtype).take(words, mode="clip")
    return x.astype(np.float32)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns a @ b in float32, by products small enough for one thread."""
    (m, k), n = a.shape, b.shape[1]
    if k * n > _ONE_THREAD_TERMS and k > 1:
        half = k // 2
        return product(a[:, :half], b[:half]) + product(a[:, half:], b[half:])
    rows = math.gcd(m, max(1, _ONE_THREAD_TERMS // (k * n)))
    # NumPy calls BLAS for each of the stacked matrices.
    stacked = np.ascontiguousarray(a).reshape(m // rows, rows, k)
    return np.matmul(stacked, np.ascontiguousarray(b)).reshape(m, n)


_TABLES: dict[Any, np.ndarray] = {}


def _table(dtype: Any) -> np.ndarray:
    """Returns the float32 value of each pattern of 8 or 16 bits."""
    if dtype not in _TABLES:
        word = np.dtype(f"u{dtype.itemsize}")
        patterns = np.arange(2 ** (8 * dtype.itemsize), dtype=word)
        _TABLES[dtype] = patterns.view(dtype).astype(np.float32)
    return _TABLES[dtype]


def _int8_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the product modulo 2**32, by float32 multiplications, which are fast."""
    total: Any = np.int32(0)
    signed = a.dtype == b.dtype == np.int8
    step = _EXACT_INT8_TERMS if signed else _EXACT_UINT8_TERMS
    for k in range(0, a.shape[1], step):
        piece = slice(k, k + step)
        exact = product(a[:, piece].astype(np.float32), b[piece].astype(np.float32))
        total = total + exact.astype(np.int32)
    return total


def _float16(acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A float16 accumulator is rounded after every instruction."""
    for k in range(0, a.shape[1], _F16_K_STEP):
        piece = slice(k, k + _F16_K_STEP)
        acc = (acc.astype(np.float32) + product(a[:, piece], b[piece])).astype(
            np.float16
        )
    return acc


def _float8(acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = widen(a), widen(b)
    result = acc.astype(np.float32)
    for k in range(0, a.shape[1], _F8_K_STEP):
        step = slice(k, k + _F8_K_STEP)
        # An accumulator of float16 is rounded after every instruction.
        result = _aligned_sum(result, a[:, step], b[step])
        result = result.astype(acc.dtype).astype(np.float32)
    return result.astype(acc.dtype)


def _aligned_sum(acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums acc and the products of one instruction as integers of a common unit."""
    largest = _power_of_two(acc)
    for powers in _products(_power_of_two(a), _power_of_two(b)):
        np.maximum(largest, powers.max(axis=0), out=largest)
    # A lower bound of all products of 8-bit floats; it keeps the inverse finite.
    unit = np.maximum(largest, np.float32(2.0**-64)) * _F8_UNIT
    # Exact, as that of each power of two.
    inverse = 1 / unit
    units = np.trunc(acc * inverse)
    for products in _products(a, b):
        np.multiply(products, inverse, out=products)
        units += np.trunc(products, out=products).sum(axis=0)
    total = _keep_fraction_bits(units * unit)
    if np.isfinite(largest).all():
        return total
    plain = acc + product(a, b)
    return np.where(np.isfinite(plain), total, plain)


def _products(a: np.ndarray, b: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the products of (M, K) and (K, N), as (part of K, M, N)."""
    (m, depth), n = a.shape, b.shape[1]
    columns, rows = np.ascontiguousarray(a.T)[:, :, None], b[:, None, :]
    step = max(1, _PRODUCTS_AT_ONCE // (m * n))
    for k in range(0, depth, step):
        yield columns[k : k + step] * rows[k : k + step]


def _power_of_two(x: np.ndarray) -> np.ndarray:
    """Returns the largest power of two not above |x|; 0 for 0."""
    return (np.ascontiguousarray(x).view(np.uint32) & _EXPONENT_MASK).view(np.float32)


def _keep_fraction_bits(x: np.ndarray) -> np.ndarray:
    """Truncates float32's 23 bits of fraction as the tensor core does."""
    return (x.view(np.uint32) & _F8_MASK).view(np.float32)
