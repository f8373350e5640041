# SPDX-License-Identifier: Apache-2.0
"""Arrays in GMEM that a launch adds to its arguments and results: scratch, counters.

Each is a result of the launch that its caller drops. One with initial contents is an
operand too, of the same buffer. One that is kept may have memory of its own on devices
of this process: the operand then has its addresses. They follow from the body alone, so
that no parameter of the kernel primitive mentions them, and no transformation needs to
know them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator

import jax.numpy as jnp

from pallas_gpu import _jax, resources, types
from pallas_gpu.primitives.grids.scheduling import claim_p
from pallas_gpu.primitives.scoped import get_global_p, run_scoped_p
from pallas_gpu.program.nodes import Op
from pallas_gpu.program.walk import walk


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

    def listed(self, devices: types.Devices | None) -> tuple[int, ...]:
        """Returns the ids of the devices whose addresses of it the launch passes."""
        return devices.present if self.array.kept and devices is not None else ()


def work_arrays(jaxpr: _jax.Jaxpr) -> tuple[WorkArray, ...]:
    """Returns the arrays that a body needs, those with initial contents first."""
    found: dict[Hashable, WorkArray] = {}
    for site in walk(jaxpr):
        for work in _declared(site.op):
            found.setdefault(work.key, work)
    return tuple(sorted(found.values(), key=lambda work: work.array.initial is None))


# The key of the counter of claimed positions.
POSITIONS = "claimed positions"


def _declared(op: Op) -> Iterator[WorkArray]:
    """Yields the arrays that an operation needs; others may need the same."""
    if op.primitive is claim_p:
        counter = types.GmemArray((1,), jnp.dtype(jnp.int32), 0, types.Sharing.LAUNCH)
        yield WorkArray(POSITIONS, counter)
    if op.primitive is run_scoped_p:
        refs = resources.scope_refs(op.equation)
        for var, name in zip(refs, op.params["names"], strict=True):
            if array := var.aval.memory_space.gmem_array(var.aval):
                yield WorkArray(var, array, name)
    if op.primitive is get_global_p:
        (var,) = op.equation.outvars
        array = var.aval.memory_space.gmem_array(var.aval)
        shared = dataclasses.replace(array, sharing=types.Sharing.INSTANCE)
        yield WorkArray(var, shared)
