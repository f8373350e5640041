# SPDX-License-Identifier: Apache-2.0
"""Functions that call kernels, with each kernel's lowered module run in lockstep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from pallas_gpu import arch, compiler
from pallas_gpu.entry import call
from pallas_gpu.lockstep import run as emitted
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lowering.machine import Build
from pallas_gpu.program import build, spec
from tests.support.semantics import Warpgroup, under

# Equations that call their one body with their operands.
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


def run(
    fn: Callable[..., Any], args: Sequence[Any], semantics: Any = Warpgroup
) -> list[np.ndarray]:
    """Returns the results of a function, flat; its kernels run in lockstep.

    Raises:
      NotModelled: a kernel has an operation that the machine does not execute.
    """
    return lower(under(semantics, fn), args).run()


@dataclasses.dataclass
class Lowered:
    """A function of arrays whose kernels are lowered.

    Attributes:
      kernels: the lowered kernels, in the order of the program.
    """

    kernels: list[Build]
    _closed: Any
    _arguments: list[Any]
    _by_equation: dict[int, Build]

    def run(self) -> list[np.ndarray]:
        """Returns the results, flat.

        Raises:
          NotModelled: a kernel has an operation that the machine does not execute, or
            stands within control flow of JAX's own.
        """
        closed = self._closed
        results = self._evaluate(closed.jaxpr, closed.consts, self._arguments)
        return [np.asarray(x) for x in results]

    def _evaluate(self, jaxpr: Any, consts: Any, args: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(x: Any) -> Any:
            return x.val if isinstance(x, core.Literal) else values[x]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(x) for x in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        if eqn.primitive is call.kernel_p:
            module = self._by_equation[id(eqn)].module
            return emitted.run_module(call.CallParams(**eqn.params), module, inputs)
        bodies = list(_bodies(eqn))
        if not any(_kernels(body.jaxpr) for body in bodies):
            results = eqn.primitive.bind(*inputs, **eqn.params)
            return list(results) if eqn.primitive.multiple_results else [results]
        if eqn.primitive.name in _CALLS and len(bodies) == 1:
            return self._evaluate(bodies[0].jaxpr, bodies[0].consts, inputs)
        raise NotModelled(f"a kernel within {eqn.primitive.name}")


def lower(fn: Callable[..., Any], args: Sequence[Any]) -> Lowered:
    """Lowers every kernel that a function calls with some arguments, for its target."""
    return lower_traced(jax.make_jaxpr(fn)(*args), args)


def lower_traced(closed: core.ClosedJaxpr, args: Sequence[Any]) -> Lowered:
    """As `lower`, of a function that is traced with such arguments."""
    by_equation = {}
    for eqn in _kernels(closed.jaxpr):
        params = call.CallParams(**eqn.params)
        spec.check(build.region_of(params.jaxpr))
        target = params.compiler_params.target or "sm_90a"
        by_equation[id(eqn)] = compiler.lower(params, arch.target(target))
    assert by_equation, "the function calls no kernel"
    kernels = list(by_equation.values())
    return Lowered(kernels, closed, jax.tree.leaves(args), by_equation)


def _bodies(eqn: Any) -> list[Any]:
    return [v for v in eqn.params.values() if isinstance(v, core.ClosedJaxpr)]


def _kernels(jaxpr: Any) -> list[Any]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is call.kernel_p:
            found.append(eqn)
            continue
        for body in _bodies(eqn):
            found += _kernels(body.jaxpr)
    return found
