# SPDX-License-Identifier: Apache-2.0
"""Kernels without their `debug_check`s, and without what only those read."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_gpu import _jax
from pallas_gpu.primitives.debug import debug_check_p
from pallas_gpu.primitives.indexed import load_indexed_p
from pallas_gpu.primitives.registers import load_p
from pallas_gpu.program.rewrite import Rewrite
from pallas_gpu.program.walk import uses

# Reads that nobody would miss: their effect only keeps JAX from moving them.
_READS = (_jax.get_p, load_p, load_indexed_p)


def without_checks(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Returns a body without checks, and without the equations that only they use."""
    if not uses(jaxpr, debug_check_p):
        return jaxpr
    return _Unchecked().body(jaxpr)


class _Unchecked(Rewrite):
    def replacement(
        self, eqn: _jax.JaxprEqn, caller: _jax.JaxprEqn | None
    ) -> Sequence[_jax.JaxprEqn] | None:
        return [] if eqn.primitive is debug_check_p else None

    def is_dropped_unread(self, eqn: _jax.JaxprEqn) -> bool:
        return not eqn.effects or eqn.primitive in _READS
