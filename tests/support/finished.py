# SPDX-License-Identifier: Apache-2.0
"""The passes of the compilation pipeline, over a kernel that a test built by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.emitters.gmem import GmemView
from pallas_gpu.emitters.module import KernelBuilder, LaunchSpec
from pallas_gpu.emitters.program import passes
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.layouts import SmemLayout


def emitted(
    emit: Callable[..., None],
    operands: Sequence[Any] = (),
    results: Sequence[Any] = (),
    **spec: Any,
) -> ir.Module:
    """Returns the finished module of a body.

    Args:
      emit: takes the builder and a view of GMEM for each operand and result.
      operands, results: arrays, or their types.
      spec: of the launch.
    """
    types = [*operands, *results]
    builder = KernelBuilder(LaunchSpec("kernel", num_buffers=len(types), **spec))
    with builder as kb:
        views = [
            GmemView.whole(kb.buffers[i], i, t.shape, np.dtype(t.dtype))
            for i, t in enumerate(types)
        ]
        emit(kb, *views)
    passes.lower_host_work(builder.module)
    passes.share_subexpressions(builder.module)
    return builder.finish()


def typed(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an operand or result."""
    with jax.enable_x64(True):
        return jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))


def smem_view(
    kb: KernelBuilder,
    offset: int,
    shape: Sequence[int],
    dtype: Any,
    tiling: tuple[int, ...] | None = None,
    swizzle: int | None = None,
) -> SmemView:
    """A whole array in SMEM; in tiles its swizzle is 128 bytes unless it is given."""
    bits = 8 * np.dtype(dtype).itemsize
    swizzle = swizzle or (128 if tiling else 16)
    layout = SmemLayout(tuple(shape), bits, tiling, swizzle)
    return SmemView.whole(kb.smem_pointer(offset), layout, np.dtype(dtype))
