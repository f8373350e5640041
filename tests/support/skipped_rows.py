# SPDX-License-Identifier: Apache-2.0
"""A gather of rows that a predicate skips; its arrival on the barrier remains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from tests.support import everywhere

SHAPE = (8, 16)


def kernel(params: plgpu.CompilerParams | None = None) -> Callable[..., Any]:
    """Returns `make` for the kernel, whose rows are in reverse order."""

    def body(x, n, o, tile, full):
        tile[...] = jnp.zeros(SHAPE, jnp.float32)
        plgpu.commit_smem()
        rows = SHAPE[0] - 1 - jnp.arange(SHAPE[0])
        plgpu.copy_gmem_to_smem(x.at[rows], tile, full, predicate=n[0] > 0)
        plgpu.barrier_wait(full)
        o[...] = tile[...]

    out, tile = jax.ShapeDtypeStruct(SHAPE, jnp.float32), plgpu.SMEM(SHAPE, jnp.float32)
    return everywhere.kernel(body, out, tile, plgpu.Barrier(), compiler_params=params)


def operands(wanted: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the arguments, and what the kernel returns."""
    x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    expected = x[::-1] if wanted else np.zeros_like(x)
    return [x, np.array([int(wanted)], np.int32)], expected
