# SPDX-License-Identifier: Apache-2.0
"""Correct kernels whose order is not obvious, and how they are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere

F32 = jnp.float32
SHAPE = (8, 128)
SMEM = plgpu.SMEM(SHAPE, F32)
BARRIER = plgpu.Barrier()
X = np.random.default_rng(0).standard_normal(SHAPE, np.float32)

Case = tuple[Callable[[Any], Callable[..., Any]], list[Any], list[Any]]


class Cases(dict[str, Case]):
    """Correct kernels, by name."""

    def add(
        self, arguments: list[Any], expected: list[Any], *scratch: Any, **options: Any
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Decorates a body; scratch and options are those of `everywhere.kernel`."""

        def enter(body: Callable[..., None]) -> Callable[..., None]:
            kernel = everywhere.kernel(body, expected, *scratch, **options)
            self[body.__name__] = kernel, arguments, expected
            return body

        return enter

    def check(self, name: str) -> None:
        """Raises unless every schedule gives the results, without an alarm."""
        kernel, arguments, expected = self[name]
        got = kernel(plgpu.InterpretParams(schedules=9))(*arguments)
        for a, b in zip(jax.tree.leaves(got), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def in_warpgroup(number: int):
    """Decorates what one warpgroup does."""
    return plgpu.when(lax.axis_index("wg") == number)


def load(source, tile, full):
    plgpu.copy_gmem_to_smem(source, tile, full)
    plgpu.barrier_wait(full)
