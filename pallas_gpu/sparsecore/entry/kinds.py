# SPDX-License-Identifier: Apache-2.0
"""A program with a body for vector subcores and one for scalar subcores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax import lax

from pallas_gpu import _jax, errors, expect
from pallas_gpu.program.rewrite import Retrace
from pallas_gpu.sparsecore.primitives.kinds import (
    on_vector_subcore,
    on_vector_subcore_p,
)
from pallas_gpu.sparsecore.types import (
    ScalarSubcoreMesh,
    SubcoreMeshes,
    VectorSubcoreMesh,
)


def together(bodies: Any, meshes: Any) -> tuple[Callable[..., None], SubcoreMeshes]:
    """Returns the body and the mesh of several bodies, each with a mesh."""
    bodies = list(bodies) if expect.is_sequence(bodies) else [bodies]
    meshes = list(meshes) if expect.is_sequence(meshes) else [meshes]
    kinds = [type(mesh) for mesh in meshes]
    if len(bodies) != 2 or set(kinds) != {VectorSubcoreMesh, ScalarSubcoreMesh}:
        raise errors.ArgumentError(
            "kernel: bodies and meshes do not belong together",
            expected="one body and one mesh, or two bodies with a VectorSubcoreMesh "
            "and a ScalarSubcoreMesh",
            got=f"{len(bodies)} bodies with {[kind.__name__ for kind in kinds]}",
            hint="plsc.kernel([vector_body, scalar_body], mesh=[vectors, scalars])",
        )
    of = dict(zip(kinds, zip(bodies, meshes, strict=True), strict=True))
    (vector, vectors), (scalar, scalars) = of[VectorSubcoreMesh], of[ScalarSubcoreMesh]

    @functools.wraps(vector)
    def both(*refs: Any, **named: Any) -> None:
        # A branch whose condition each of the two functions knows.
        with _jax.trace_without_ref_rules():
            lax.cond(
                on_vector_subcore(),
                lambda: vector(*refs, **named),
                lambda: scalar(*refs, **named),
            )

    return both, SubcoreMeshes(vector=vectors, scalar=scalars)


class _ForKind(Retrace):
    """The body of one kind of subcores."""

    def __init__(self, *, is_vector: bool):
        super().__init__()
        self._is_vector = np.bool_(is_vector)

    def is_replaced(self, eqn: _jax.JaxprEqn) -> bool:
        return eqn.primitive in (
            on_vector_subcore_p, lax.convert_element_type_p, lax.cond_p,
        )  # fmt: skip

    def results(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any] | None:
        if eqn.primitive is on_vector_subcore_p:
            return [self._is_vector]
        if eqn.primitive is lax.convert_element_type_p:
            return [np.int32(operands[0])] if operands[0] is self._is_vector else None
        if eqn.primitive is lax.cond_p and isinstance(operands[0], np.int32):
            return self.run(eqn.params["branches"][operands[0]], operands[1:])
        return None


def of_each_kind(
    jaxpr: _jax.Jaxpr, mesh: Any
) -> Iterator[tuple[_jax.Jaxpr, VectorSubcoreMesh | ScalarSubcoreMesh]]:
    """Yields the body and the mesh of each kind of subcores of a program."""
    if not isinstance(mesh, SubcoreMeshes):
        yield jaxpr, mesh
        return
    for own in (mesh.vector, mesh.scalar):
        trace = _ForKind(is_vector=own.is_vector)

        def again(*refs: Any, trace: Any = trace) -> Sequence[Any]:
            return trace.run(jaxpr, list(refs))

        avals = [v.aval.update() for v in jaxpr.invars]
        yield _jax.trace(again, avals, own.axes)[0].jaxpr, own
