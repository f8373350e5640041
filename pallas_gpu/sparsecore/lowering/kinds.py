# SPDX-License-Identifier: Apache-2.0
"""Programs for both kinds of subcores: a function for each in one module.

The first one is that of vector subcores, which the stages lower. The other one is
lowered by itself, and then moves to the module.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import compiler, errors, resources
from pallas_gpu.lowering.machine import Build
from pallas_gpu.sparsecore.entry.kinds import of_each_kind
from pallas_gpu.sparsecore.types import VMEM_SHARED, SubcoreMeshes

# By the body of vector subcores that of scalar ones, as long as the former exists.
_SCALAR: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def of_vector_subcores(build: Build) -> Build:
    """Leaves the operations of vector subcores."""
    params: Any = build.params
    if not isinstance(params.mesh, SubcoreMeshes):
        return build
    (vector, _), (scalar, _) = of_each_kind(params.jaxpr, params.mesh)
    _require_shared(vector, scalar)
    _SCALAR[vector] = scalar
    return build.replace(params=dataclasses.replace(params, jaxpr=vector))


def with_scalar_subcores(build: Build) -> Build:
    """Adds the function of scalar subcores."""
    params: Any = build.params
    if not isinstance(params.mesh, SubcoreMeshes):
        return build
    own = dataclasses.replace(
        params,
        jaxpr=_SCALAR[params.jaxpr],
        mesh=params.mesh.scalar,
        name=f"{params.name}_scalar",
    )
    other = compiler.run(Build(own, build.target), until="rules")
    with build.module.context, ir.Location.unknown():
        moved = ir.Module.parse(str(other.module))
        build.module.body.append(moved.body.operations[0].clone())
    return build


def _require_shared(vector: Any, scalar: Any) -> None:
    """Raises unless both kinds declare the same VMEM_SHARED, an argument of both."""
    found = [
        [
            (tuple(var.aval.shape), str(var.aval.dtype), var.aval.tiling)
            for site in resources.scopes(jaxpr)
            for var in resources.scope_refs(site.eqn)
            if var.aval.memory_space is VMEM_SHARED
        ]
        for jaxpr in (vector, scalar)
    ]
    if found[0] != found[1]:
        raise errors.UnsupportedError(
            "one kind of subcores declares VMEM_SHARED of its own",
            expected="VMEM_SHARED in scratch_types of the kernel, for both kinds",
            got=f"{found[0]} of vector subcores, {found[1]} of scalar ones",
            hint="move the declaration to scratch_types",
        )
