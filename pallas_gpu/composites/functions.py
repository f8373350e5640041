# SPDX-License-Identifier: Apache-2.0
"""Functions of elements that consist of others."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_gpu.entry.expand import Composite, composite


@composite("cosh")
def _cosh(composite: Composite, x: Any) -> Any:
    """exp(x) / 2 overflows later than exp(x)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    half = jnp.log(jnp.asarray(0.5, wide.dtype))
    return (jnp.exp(wide + half) + jnp.exp(half - wide)).astype(x.dtype)
