# SPDX-License-Identifier: Apache-2.0
"""Functions of several devices, run on devices that the emulator has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu

_AUTO = jax.sharding.AxisType.Auto


def mesh(**axes: int) -> jax.sharding.AbstractMesh:
    """Returns a mesh of axes and their sizes, of no devices in particular."""
    return jax.sharding.AbstractMesh(
        tuple(axes.values()), tuple(axes), axis_types=(_AUTO,) * len(axes)
    )


def emulated(f: Callable[..., Any], mesh: Any, **options: Any) -> Callable[..., Any]:
    """Returns a function of arrays; by default sharded over all axes by rows."""
    rows = jax.P(tuple(mesh.axis_names))
    specs = {"in_specs": rows, "out_specs": rows, **options}
    return plgpu.emulate_mesh(jax.shard_map(f, mesh=mesh, **specs))


def numbers(*shape: int, dtype: str = "float32", most: int = 3) -> jax.Array:
    """Whole numbers, of which the sums are exact in any order."""
    rng = np.random.default_rng(sum(shape))
    values = rng.integers(-most, most + 1, shape).astype(np.float32)
    return jnp.asarray(values).astype(dtype)
