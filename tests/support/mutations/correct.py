# SPDX-License-Identifier: Apache-2.0
"""Correct kernels whose order is not obvious, and how they are run.

Each is a function that returns a kernel's body, its options, arguments and results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu

F32 = jnp.float32
SHAPE = (8, 128)
OUT = jax.ShapeDtypeStruct(SHAPE, F32)
SMEM = plgpu.SMEM(SHAPE, F32)
BARRIER = plgpu.Barrier()
X = np.random.default_rng(0).standard_normal(SHAPE, np.float32)

Case = tuple[Callable[..., None], dict[str, Any], list[Any], list[Any]]


class Cases(dict[str, Callable[[], Case]]):
    """Correct kernels, by name."""

    def add(self, make: Callable[[], Case]) -> Callable[[], Case]:
        """Decorates the function that makes one."""
        self[make.__name__] = make
        return make

    def check(self, name: str) -> None:
        """Raises unless every schedule gives the results, without an alarm."""
        body, keywords, arguments, expected = self[name]()
        params = plgpu.InterpretParams(schedules=9)
        got = plgpu.kernel(body, **keywords, interpret=params)(*arguments)
        for a, b in zip(jax.tree.leaves(got), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def options(*scratch: Any, out: Any = OUT, warpgroups: int = 1, ctas: int = 1):
    result: dict[str, Any] = {"out_type": out, "scratch_types": list(scratch)}
    if warpgroups > 1:
        result |= {"num_threads": warpgroups, "thread_name": "wg"}
    if ctas > 1:
        result |= {"cluster": (ctas,), "cluster_names": ("cta",)}
    return result


def in_warpgroup(number: int):
    """Decorates what one warpgroup does."""
    return plgpu.when(lax.axis_index("wg") == number)


def load(source, tile, full):
    plgpu.copy_gmem_to_smem(source, tile, full)
    plgpu.barrier_wait(full)
