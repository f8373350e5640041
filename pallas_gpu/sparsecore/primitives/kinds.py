# SPDX-License-Identifier: Apache-2.0
"""Programs for both kinds of subcores: which one executes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_gpu.sparsecore.primitives._define import array_type, define

on_vector_subcore_p = define(
    "on_vector_subcore", "kinds", results=lambda: [array_type((), jnp.bool_)]
)


def on_vector_subcore() -> jax.Array:
    """Returns whether a vector subcore executes: the compiler knows it."""
    (found,) = on_vector_subcore_p.bind()
    return found
