# SPDX-License-Identifier: Apache-2.0
"""Who accepts a kernel: the emulator, and the lowering under both semantics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import pallas_gpu as plgpu
from tests.support.lockstep import kernels as in_lockstep
from tests.support.semantics import BOTH, under

Error = plgpu.errors.PallasGpuError


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What each of them says.

    Attributes:
      traced: the error of a call's trace, before any of them sees the kernel.
      emulated: the error of the emulator; None accepts.
      lowered: those of the lowering, by semantics.
    """

    traced: Error | None = None
    emulated: Error | None = None
    lowered: dict[Any, Error | None] = dataclasses.field(default_factory=dict)

    @property
    def refusals(self) -> list[Error]:
        errors = [self.traced, self.emulated, *self.lowered.values()]
        return [error for error in errors if error is not None]


def judge(
    function: Callable[..., Any], args: Sequence[Any], *, execute: bool = True
) -> Verdict:
    """Asks all of them; those that accept must give the same results.

    Args:
      function: calls at most one kernel.
      args: its arguments.
      execute: whether to run what was lowered.
    """
    closed, traced = _attempt(lambda: jax.make_jaxpr(function)(*args))
    if traced is not None:
        return Verdict(traced)
    emulated, error = _attempt(lambda: function(*args))
    if not any(eqn.primitive.name == "pallas_gpu_kernel" for eqn in closed.eqns):
        assert all(a.size == 0 for a in jax.tree.leaves(emulated)), "no launch"
        return Verdict()
    lowered = {}
    for semantics in BOTH:
        program, lowered[semantics] = _attempt(
            lambda: in_lockstep.lower(under(semantics, function), args)  # noqa: B023
        )
        if execute and program is not None and error is None:
            _same(emulated, program.run())
    return Verdict(None, error, lowered)


def _attempt(run: Callable[[], Any]) -> tuple[Any, Error | None]:
    try:
        return run(), None
    except Error as error:
        return None, error


def _same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = (np.asarray(v).astype(np.float64) for v in (x, y))
        np.testing.assert_array_equal(x, y)
