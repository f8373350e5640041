# SPDX-License-Identifier: Apache-2.0
"""Pairs of CTAs (cta_group::2): the leader, and the mask of both.

The CTAs of a pair are those of a cluster whose ranks differ in the last bit (PTX ISA,
tcgen05 "CTA pair"); the one of even rank is the leader.
"""

from __future__ import annotations

from jaxlib.mlir import ir

from pallas_gpu.emitters import cluster, module
from pallas_gpu.emitters.elements import arith

# The mask of two CTAs, from the rank of the leader on.
_BOTH = 0b11


def group(collective: bool) -> ir.Attribute:
    """The `.cta_group` of an instruction: that of a pair, or of one CTA."""
    name = "cta_2" if collective else "cta_1"
    return ir.Attribute.parse(f"#nvvm.cta_group<{name}>")


def issuer(collective: bool) -> ir.Value:
    """i1, true in the thread that issues: the elected one, of a pair the leader's."""
    kernel = module.current()
    if not collective:
        return kernel.elected
    return arith.andi(kernel.elected, kernel.hoisted("leads its pair", _leads))


def mask() -> ir.Value:
    """i16: both CTAs of the leader's pair, in the leader. PTX: a `ctaMask`."""
    kernel = module.current()
    i16 = ir.IntegerType.get_signless(16)
    if _ctas() == 2:
        return arith.constant(i16, _BOTH)

    def emit() -> ir.Value:
        return arith.trunci(i16, arith.shli(kernel.i32(_BOTH), cluster.rank()))

    return kernel.hoisted("mask of its pair", emit)


def _leads() -> ir.Value:
    kernel = module.current()
    rank = cluster.rank()
    if _ctas() > 2:
        rank = arith.andi(rank, kernel.i32(1))
    return arith.cmpi(arith.CmpIPredicate.eq, rank, kernel.i32(0))


def _ctas() -> int:
    x, y, z = module.current().spec.cluster
    return x * y * z
