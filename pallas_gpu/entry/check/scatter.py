# SPDX-License-Identifier: Apache-2.0
"""Scatters that apply a function to what they update: `x.at[i].apply(f)`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax

from pallas_gpu import _jax, errors, types
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.nodes import Op


def applied(params: Mapping[str, Any], x: Any) -> Any:
    """Returns the function of a scatter for all elements of an array.

    Args:
      params: of a `scatter` that has a function.
      x: the elements.
    """

    def one(element: Any) -> Any:
        consts = params["update_consts"]
        (result,) = _jax.eval_jaxpr(params["update_jaxpr"], consts, element, element)
        return result

    return functools.reduce(lambda f, _: jax.vmap(f), range(x.ndim), one)(x)


@registry.checks(_jax.primitive_by_name("scatter"))
def _check_function(op: Op, mesh: types.Mesh) -> None:
    """Refuses a function of elements that may be the same: it is applied to each."""
    params, indices = op.params, op.inputs[1]
    one = math.prod(indices.shape[:-1]) == 1
    if params["update_jaxpr"] is None or params["unique_indices"] or one:
        return
    raise errors.UnsupportedError(
        "x.at[i].apply(f) with indices that may be equal is not supported in a kernel",
        expected="an index, a slice, or unique indices",
        got=f"indices of shape {tuple(indices.shape[:-1])}",
        hint="pass unique_indices=True if they are, or set f of the elements, "
        "which applies f once",
    )
