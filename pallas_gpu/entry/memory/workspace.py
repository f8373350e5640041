# SPDX-License-Identifier: Apache-2.0
"""Arrays in GMEM that a launch adds to its arguments and results: scratch, counters.

Each is a result of the launch that its caller drops. One with initial contents is an
operand too, of the same buffer. They follow from the body alone, so that no parameter
of the kernel primitive mentions them, and no transformation needs to know them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import jax.numpy as jnp

from pallas_gpu import _jax, resources, types
from pallas_gpu.primitives.grids.scheduling import claim_p
from pallas_gpu.primitives.scoped import get_global_p, run_scoped_p
from pallas_gpu.walk import walk


@dataclasses.dataclass(frozen=True)
class WorkArray:
    """One array that the launch adds.

    Attributes:
      key: what identifies it in a body and in its expansion: the variable of its
        reference, or a name.
      array: its type, its initial contents, and who shares it.
      name: by which the author knows it; may be empty.
    """

    key: Hashable
    array: types.GmemArray
    name: str = ""


Declarations = Callable[[_jax.JaxprEqn], Sequence[WorkArray]]
_DECLARERS: dict[_jax.Primitive, Declarations] = {}


def declares(primitive: _jax.Primitive) -> Callable[[Declarations], Declarations]:
    """Registers which arrays an equation of the primitive needs.

    Equations may declare the same one: that with an equal key.
    """

    def enter(declarations: Declarations) -> Declarations:
        _DECLARERS[primitive] = declarations
        return declarations

    return enter


def work_arrays(jaxpr: _jax.Jaxpr) -> tuple[WorkArray, ...]:
    """Returns the arrays that a body needs, those with initial contents first."""
    found: dict[Hashable, WorkArray] = {}
    for site in walk(jaxpr):
        if (declarations := _DECLARERS.get(site.eqn.primitive)) is not None:
            for work in declarations(site.eqn):
                found.setdefault(work.key, work)
    return tuple(sorted(found.values(), key=lambda work: work.array.initial is None))


# The key of the counter of claimed positions.
POSITIONS = "claimed positions"


@declares(claim_p)
def _counter(eqn: _jax.JaxprEqn) -> list[WorkArray]:
    counter = types.GmemArray((1,), jnp.dtype(jnp.int32), 0, types.Sharing.LAUNCH)
    return [WorkArray(POSITIONS, counter)]


@declares(run_scoped_p)
def _scratch(eqn: _jax.JaxprEqn) -> list[WorkArray]:
    declared = zip(resources.scope_refs(eqn), eqn.params["names"], strict=True)
    arrays = (
        (var, var.aval.memory_space.gmem_array(var.aval), name)
        for var, name in declared
    )
    return [WorkArray(var, array, name) for var, array, name in arrays if array]


@declares(get_global_p)
def _global(eqn: _jax.JaxprEqn) -> list[WorkArray]:
    (var,) = eqn.outvars
    array = var.aval.memory_space.gmem_array(var.aval)
    return [WorkArray(var, dataclasses.replace(array, sharing=types.Sharing.INSTANCE))]
