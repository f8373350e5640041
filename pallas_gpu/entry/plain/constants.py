# SPDX-License-Identifier: Apache-2.0
"""Small arrays that a body closes over: tables, coefficients, literals of jnp.array.

They become inputs that the body reads at its start, so each thread has them in its
registers; larger arrays are refused.
"""

from __future__ import annotations

import math
from typing import Any

from pallas_gpu import _jax

# 32 registers of a thread for 32-bit elements. More is a mistake rather than a table.
MAX_ELEMENTS = 4096


def is_array(aval: Any) -> bool:
    """True for an array with dimensions; false for scalars and references."""
    return bool(getattr(aval, "shape", ())) and not isinstance(aval, _jax.AbstractRef)


def is_small(aval: Any) -> bool:
    """Whether a body may close over an array of this type."""
    return is_array(aval) and math.prod(aval.shape) <= MAX_ELEMENTS


def of_call(eqn: _jax.JaxprEqn, parameter: str) -> bool:
    """Whether the function that an equation calls closes over small arrays.

    JAX stores them in the function: they are not consts of the body.
    """
    inner = getattr(eqn.params[parameter], "jaxpr", eqn.params[parameter])
    return any(is_small(var.aval) for var in inner.constvars)
