# SPDX-License-Identifier: Apache-2.0
"""Pairs of CTAs: their axis, and that a kernel has one group of CTAs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry.check import references
from pallas_gpu.entry.check.tma import require_cluster_axes, require_pair
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.scoped import run_scoped_p
from pallas_gpu.primitives.tensor_cores import operand_copy, scales, sparsity, tcgen05
from pallas_gpu.program.nodes import Op
from pallas_gpu.program.walk import walk

_OF_GROUPS = (
    tcgen05.tcgen05_mma_p,
    tcgen05.tcgen05_commit_arrive_p,
    operand_copy.async_copy_smem_to_tmem_p,
    scales.async_copy_scales_to_tmem_p,
    sparsity.async_copy_sparse_metadata_to_tmem_p,
)


@registry.checks(*_OF_GROUPS)
def _check(op: Op, mesh: types.Mesh) -> None:
    references.check_operands(op, mesh)
    axis = op.params["collective_axis"]
    if axis is not None:
        require_cluster_axes((axis,), mesh, op.name)
        require_pair((axis,), mesh, op.name, "collective_axis")


def check_groups(jaxpr: _jax.Jaxpr) -> None:
    """Raises ArgumentError where a kernel has operations of one CTA and of a pair.

    PTX ISA, tcgen05 "CTA pair": all tcgen05 instructions of a kernel have the same
    cta_group.
    """
    first: _Use | None = None
    for site in walk(jaxpr):
        for use in _uses(site.op):
            first = first or use
            # What arrays alone mix is an error of their declarations.
            operation = first.is_operation or use.is_operation
            if operation and first.pair != use.pair:
                raise errors.ArgumentError(
                    "a kernel mixes tcgen05 operations of one CTA and of a pair",
                    expected="collective_axis in all of them and collective=True in "
                    "all declarations of TMEM, or neither",
                    got=f"{first.what}, then {use.what}",
                    hint="pass collective_axis to every tcgen05_mma and "
                    "tcgen05_commit_arrive",
                ).with_location(site.where)


class _Use(NamedTuple):
    """What one CTA does, or a pair."""

    pair: bool
    what: str
    is_operation: bool


def _uses(op: Op) -> Iterator[_Use]:
    """Yields what an operation does with a cta_group."""
    if op.primitive in _OF_GROUPS:
        axis = op.params.get("collective_axis")
        what = f"{op.name} with collective_axis={axis!r}"
        yield _Use(axis is not None, what, True)
    if op.primitive is run_scoped_p:
        for ref in op.made:
            if ref.aval.memory_space is types.TMEM:
                collective = ref.aval.storage.collective
                what = f"an array in TMEM with collective={collective}"
                yield _Use(collective, what, False)
