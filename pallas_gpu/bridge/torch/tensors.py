# SPDX-License-Identifier: Apache-2.0
"""Tensors as kernels see them: types, requirements, their bytes on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from pallas_gpu import errors, expect

# Copies by TMA, and loads of vectors, need it (PTX ISA, Tensor-map; JAX's arrays have
# more).
ALIGNMENT_BYTES = 16
_NAMES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu",
)  # fmt: skip
_JAX_DTYPES = {getattr(torch, n): jnp.dtype(n) for n in _NAMES if hasattr(torch, n)}
_TORCH_DTYPES = {dtype: of_torch for of_torch, dtype in _JAX_DTYPES.items()}


def torch_dtype(dtype: Any) -> torch.dtype:
    """Returns torch's dtype for one of JAX."""
    found = _TORCH_DTYPES.get(np.dtype(dtype))
    if found is None:
        raise errors.UnsupportedError(
            "as_torch_kernel: an array has a dtype that torch does not have",
            expected=", ".join(x.name for x in _TORCH_DTYPES),
            got=np.dtype(dtype).name,
            hint="let the function return the bytes in another dtype",
        )
    return found


def type_of(x: Any, what: str) -> jax.ShapeDtypeStruct:
    """Returns the type that a tensor has in JAX."""
    if not isinstance(x, torch.Tensor):
        raise errors.ArgumentTypeError(
            f"{what} is not a tensor",
            expected="torch.Tensor",
            got=expect.shown(x),
            hint="bind what is static with functools.partial before as_torch_kernel",
        )
    dtype = _JAX_DTYPES.get(x.dtype)
    if dtype is None or x.layout is not torch.strided or x.is_conj() or x.is_neg():
        raise errors.ArgumentTypeError(
            f"{what} is a tensor of a kind that JAX does not have",
            expected="elements in order, of a dtype of JAX",
            got=f"{x.dtype}, {x.layout}, conj={x.is_conj()}, neg={x.is_neg()}",
            hint="x.to_dense(), x.resolve_conj() or x.view(dtype) makes it one",
        )
    if dtype.itemsize == 8 and dtype.kind in "iuf" and not jax.config.jax_enable_x64:
        raise errors.ArgumentTypeError(
            f"{what} has 64 bits per element, and JAX makes 32 of them",
            expected="32 bits or less, or JAX with 64 bits",
            got=x.dtype,
            hint=f"x.to(torch.{dtype.name[:-2]}32), or "
            'jax.config.update("jax_enable_x64", True)',
        )
    return jax.ShapeDtypeStruct(tuple(map(int, x.shape)), dtype)


def require_order(x: torch.Tensor, what: str) -> None:
    """Raises unless a tensor is contiguous and aligned."""
    if not x.is_contiguous():
        raise errors.ArgumentError(
            f"{what} is not contiguous",
            expected=f"strides {strides(x.shape)}, row-major",
            got=f"shape {tuple(x.shape)}, strides {x.stride()}",
            hint="pass x.contiguous(), which copies it",
        )
    if x.data_ptr() % ALIGNMENT_BYTES:
        raise errors.ArgumentError(
            f"{what} is not aligned",
            expected=f"an address that is a multiple of {ALIGNMENT_BYTES}",
            got=f"{x.data_ptr():#x}, the storage plus {x.storage_offset()} elements",
            hint="pass x.clone(), which copies the part that x is",
        )


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that a kernel can take, a copy if necessary."""
    x = x.detach().contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT_BYTES else x


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a tensor that is row-major."""
    return tuple(
        math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape))
    )


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """Returns the elements of a tensor; on a CPU they share memory."""
    # NumPy knows more dtypes than torch converts to its own: the bytes are passed.
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.cpu().numpy().view(_JAX_DTYPES[x.dtype]).reshape(tuple(x.shape))


def from_numpy(array: Any, device: torch.device) -> torch.Tensor:
    """Returns a new tensor with the elements of an array."""
    array = np.asarray(array)
    flat = np.array(array, order="C").reshape(-1).view(np.uint8)
    dtype = torch_dtype(array.dtype)
    return torch.from_numpy(flat).to(device).view(dtype).reshape(array.shape)
