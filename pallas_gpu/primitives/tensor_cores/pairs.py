# SPDX-License-Identifier: Apache-2.0
"""tcgen05 of pairs of CTAs: what the operands of a product have to be.

Each CTA of a pair has half of the rows of `a` and of the accumulator, and half of the
columns of `b`; the accumulator has all columns in both (PTX ISA, "Data path layout
organization": layouts A and B). A `b` of 8 bits along N consists of whole atoms of at
least 32 columns in each CTA, which is more than its instructions ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_gpu import errors, types
from pallas_gpu.layouts.tmem import mma_instruction as instructions
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.scoped import run_scoped_p

_CTAS = 2


def require_copy(source: Any, target: Any, axis: str | None, who: str) -> bool:
    """Returns whether a copy from SMEM to TMEM is that of a pair of CTAs."""
    ops.require_space(source, types.SMEM, who, "the source")
    ops.require_space(target, types.TMEM, who, "the destination")
    collective = axis is not None
    require_allocation(target, collective=collective, who=who)
    return collective


def require_allocation(array: Any, *, collective: bool, who: str) -> None:
    """Raises ArgumentError unless an array in TMEM is allocated by those who use it."""
    if types.base_aval(array).storage.collective == collective:
        return
    raise errors.ArgumentError(
        f"{who}: an array in TMEM is not that of "
        + ("a pair of CTAs" if collective else "one CTA"),
        expected=f"collective={collective} in its declaration, as collective_axis is "
        + ("given" if collective else "not given"),
        got=types.describe(array),
        hint="declare it with plgpu.TMEM(shape, dtype, collective=True), and pass "
        "collective_axis; or neither",
    )


def require_shapes(acc: Any, a: Any, b: Any) -> None:
    """Raises ShapeError unless the operands of one CTA are those of a pair's product.

    Args:
      acc: (M, N); M is that of one CTA.
      a: (M, K).
      b: (K, N / 2).
    """
    shapes = tuple(acc.shape), tuple(a.shape), tuple(b.shape)
    two = all(len(s) == 2 for s in shapes)
    if not two or (
        shapes[0] != (shapes[1][0], _CTAS * shapes[2][1])
        or shapes[1][1] != shapes[2][0]
    ):
        raise errors.ShapeError(
            "tcgen05_mma: the shapes do not form a product of a pair of CTAs",
            expected="in each CTA acc (M, N), a (M, K), b (K, N / 2)",
            got="acc {}, a {}, b {}".format(*shapes),
            hint="each CTA has half of the rows of the product and of a, and half of "
            "the columns of b",
        )
    m, n = shapes[0]
    integer = jnp.issubdtype(a.dtype, jnp.integer)
    kind = instructions.Kind.I8 if integer else instructions.Kind.F16
    steps = instructions.n_step(kind, _CTAS)
    if m in instructions.ROWS and n % steps == 0 and n <= instructions.MAX_N:
        return
    raise errors.ShapeError(
        "tcgen05_mma: the tensor cores of a pair have no instruction of this shape",
        expected=f"M = 64 or 128 in each CTA, N a multiple of {steps} up to "
        f"{instructions.MAX_N}",
        got=f"M = {m}, N = {n}",
        hint="split N into several accumulators, each with columns of b of both CTAs",
    )


# --- the complete kernel --------------------------------------------------------------


@registry.checks_program
def _check_groups(sites: Any) -> None:
    """Raises ArgumentError where a kernel has operations of one CTA and of a pair.

    PTX ISA, tcgen05 "CTA pair": all tcgen05 instructions of a kernel have the same
    cta_group.
    """
    first: _Use | None = None
    for site in sites:
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


def _uses(op: Any) -> Iterator[_Use]:
    """Yields what an operation does with a cta_group."""
    if "collective_axis" in op.params:
        axis = op.params["collective_axis"]
        what = f"{op.name} with collective_axis={axis!r}"
        yield _Use(axis is not None, what, True)
    if op.primitive is run_scoped_p:
        for ref in op.made:
            if ref.aval.memory_space is types.TMEM:
                collective = ref.aval.storage.collective
                what = f"an array in TMEM with collective={collective}"
                yield _Use(collective, what, False)
