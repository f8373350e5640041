# SPDX-License-Identifier: Apache-2.0
"""Bodies for SparseCores, traced and checked without running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import sparsecore as plsc
from pallas_gpu.program import text
from pallas_gpu.program.build import region_of

LANES = 16  # of tpu7x, the default


def vectors(**sizes: Any) -> Any:
    """A mesh of vector subcores: axes "core" and "subcore"."""
    return plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", **sizes
    )


def scalars(**sizes: Any) -> Any:
    """A mesh of scalar subcores: an axis "core"."""
    return plsc.ScalarSubcoreMesh(axis_name="core", **sizes)


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The type of an argument, a result."""
    return jax.ShapeDtypeStruct(shape, dtype)


_VECTOR = array(1024)


def trace(
    body: Callable[..., Any],
    *,
    inputs: Sequence[Any] = (_VECTOR,),
    out_type: Any = _VECTOR,
    mesh: Any = None,
    **options: Any,
) -> Any:
    """The jaxpr of a body: its call is traced, and checked, for these types."""
    mesh = vectors() if mesh is None else mesh
    call = plsc.kernel(body, out_type, mesh=mesh, **options)
    (eqn,) = jax.make_jaxpr(call)(*inputs).eqns
    return eqn.params["jaxpr"]


def program(body: Callable[..., Any], **options: Any) -> str:
    """The program of a body as text, without lines."""
    shown = text.text(region_of(trace(body, **options)), body.__name__)
    return "\n".join(line.split("  #")[0].rstrip() for line in shown.splitlines())
