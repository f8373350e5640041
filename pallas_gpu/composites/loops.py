# SPDX-License-Identifier: Apache-2.0
"""Loops over arrays: `jax.lax.scan` and `jax.lax.map`.

A loop's step reads its parts of arrays, and writes its results, in SMEM. Where several
warpgroups run a kernel, each with a scope of its own, the arrays stay in registers: a
step selects its part of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax, types
from pallas_gpu.composites.functions import unsigned
from pallas_gpu.entry.expand import Composite, composite
from pallas_gpu.entry.scoped import run_scoped


def _has_arrays(eqn: _jax.JaxprEqn) -> bool:
    """Whether a scan slices or stacks arrays, or unrolls a part of its last steps."""
    consts, carries = _jax.scan_arity(eqn.params)
    sliced, stacked = len(eqn.invars) - consts - carries, len(eqn.outvars) - carries
    length, unroll = eqn.params["length"], int(eqn.params["unroll"])
    return bool(sliced or stacked or length % max(unroll, 1))


@composite("scan", when=_has_arrays)
def _scan(composite: Composite, *operands: Any) -> list[Any]:
    n_consts, n_carry = _jax.scan_arity(dict(composite.params))
    loop = _Loop(
        composite.params,
        operands[:n_consts],
        operands[n_consts : n_consts + n_carry],
        operands[n_consts + n_carry :],
        [_jax.ShapedArray(a.shape, a.dtype) for a in composite.out_avals[n_carry:]],
    )
    if not loop.arrays and not loop.results:
        return loop.run(_Selected(loop))
    if composite.kernel.mesh.warpgroups > 1:
        return loop.run(_Selected(loop))
    scratch = [types.SMEM(a.shape, a.dtype) for a in (*loop.arrays, *loop.results)]

    def scoped(*refs: Any) -> list[Any]:
        return loop.run(_Stored(loop, refs))

    return run_scoped(scoped, *scratch)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A scan.

    Attributes:
      params: of the equation.
      consts, carry: operands that steps share, and those that they pass on.
      arrays: operands of which each step has a part.
      results: types of the arrays of which each step makes a part.
    """

    params: Any
    consts: Sequence[Any]
    carry: Sequence[Any]
    arrays: Sequence[Any]
    results: Sequence[Any]

    def run(self, storage: _Stored | _Selected) -> list[Any]:
        """Runs the loop; returns the last carry, and the results."""
        length, unroll = self.params["length"], max(int(self.params["unroll"]), 1)

        def step(state: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], None]:
            return self._step(storage, state), None

        state = (np.int32(0), tuple(self.carry), storage.initial())
        whole = length - length % unroll
        if whole:
            state, _ = lax.scan(step, state, None, length=whole, unroll=unroll)
        for _ in range(length - whole):
            state, _ = step(state, None)
        return [*state[1], *storage.results(state[2])]

    def _step(
        self, storage: _Stored | _Selected, state: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        count, carry, stacked = state
        last = self.params["length"] - 1
        index = last - count if self.params["reverse"] else count
        body = self.params["jaxpr"]
        parts = [storage.part(i, index) for i in range(len(self.arrays))]
        made = _jax.eval_jaxpr(body.jaxpr, body.consts, *self.consts, *carry, *parts)
        carry, ys = made[: len(self.carry)], made[len(self.carry) :]
        stacked = storage.with_parts(stacked, index, ys)
        return count + np.int32(1), tuple(carry), stacked


class _Stored:
    """The arrays of a loop in SMEM."""

    def __init__(self, loop: _Loop, refs: Sequence[Any]):
        count = len(loop.arrays)
        self._arrays, self._results = refs[:count], refs[count:]
        for ref, array in zip(self._arrays, loop.arrays, strict=True):
            ref[...] = array

    def initial(self) -> tuple[Any, ...]:
        """Returns what the steps pass on: nothing."""
        return ()

    def part(self, i: int, index: Any) -> Any:
        """Returns a step's part of an array."""
        return self._arrays[i][index]

    def with_parts(self, stacked: Any, index: Any, parts: Sequence[Any]) -> Any:
        """Stores a step's results."""
        for ref, part in zip(self._results, parts, strict=True):
            ref[index] = part
        return stacked

    def results(self, stacked: Any) -> list[Any]:
        """Returns the results of all steps."""
        return [ref[...] for ref in self._results]


class _Selected:
    """The arrays of a loop in registers."""

    def __init__(self, loop: _Loop):
        self._loop = loop

    def initial(self) -> tuple[Any, ...]:
        """Returns the results before the first step."""
        return tuple(jnp.zeros(a.shape, a.dtype) for a in self._loop.results)

    def part(self, i: int, index: Any) -> Any:
        """Returns a step's part of an array: what is left of it is combined."""
        array = self._loop.arrays[i]
        chosen = lax.broadcasted_iota(np.int32, array.shape, 0) == index
        if array.dtype == np.bool_:
            return lax.reduce_or(array & chosen, axes=(0,))
        raw = unsigned(array)
        raw = lax.reduce_or(jnp.where(chosen, raw, jnp.zeros_like(raw)), axes=(0,))
        return lax.bitcast_convert_type(raw, array.dtype)

    def with_parts(self, stacked: Any, index: Any, parts: Sequence[Any]) -> Any:
        """Returns the results with those of a step."""
        return tuple(
            jnp.where(
                lax.broadcasted_iota(np.int32, whole.shape, 0) == index,
                jnp.broadcast_to(part[None], whole.shape),
                whole,
            )
            for whole, part in zip(stacked, parts, strict=True)
        )

    def results(self, stacked: Any) -> list[Any]:
        """Returns the results of all steps."""
        return list(stacked)
