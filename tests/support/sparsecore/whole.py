# SPDX-License-Identifier: Apache-2.0
"""Functions that call kernels for SparseCores, with the kernels run in other ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import _jax, compiler
from pallas_gpu.arch import tpu
from pallas_gpu.entry.call import CallParams, kernel_p
from pallas_gpu.lowering.machine import Build
from pallas_gpu.program.bodies import equations
from pallas_gpu.program.build import CALLS
from pallas_gpu.sparsecore.runtime import stages as stages  # registers the machine
from pallas_gpu.sparsecore.types import chips
from tests.support.sparsecore import interpreter


def launches(function: Callable[..., Any], *args: Any, target: str) -> list[CallParams]:
    """The kernels that a function calls for a chip, in order."""
    closed = _traced(function, args, target)
    found = equations(closed.jaxpr)
    return [CallParams(**e.params) for e in found if e.primitive is kernel_p]


def builds(function: Callable[..., Any], *args: Any, target: str) -> list[Build]:
    """The modules of the kernels that a function calls for a chip."""
    chip = tpu.target(target)
    return [compiler.lower(x, chip) for x in launches(function, *args, target=target)]


def interpreted(
    function: Callable[..., Any], *args: Any, target: str, seed: int = 0
) -> list[np.ndarray]:
    """What a function computes if the modules of its kernels are interpreted."""

    def run(params: dict[str, Any], arrays: Sequence[Any]) -> list[np.ndarray]:
        build = compiler.lower(CallParams(**params), tpu.target(target))
        given = [np.asarray(x) for x in arrays]
        return interpreter.execute(build.module, *given, seed=seed)

    return evaluated(function, *args, target=target, run=run)


def evaluated(
    function: Callable[..., Any], *args: Any, target: str, run: Callable[..., Any]
) -> list[np.ndarray]:
    """What a function computes if `run(params, arrays)` runs its kernels."""
    closed = _traced(function, args, target)
    return _evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(args), run)


def _traced(function: Callable[..., Any], args: Sequence[Any], target: str) -> Any:
    with chips.tracing_for(target):
        return jax.make_jaxpr(function)(*args)


def _evaluated(jaxpr: Any, consts: Any, args: Any, run: Any) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, _jax.Literal) else values[x]

    for eqn in jaxpr.eqns:
        given = [read(x) for x in eqn.invars]
        inner = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
        if eqn.primitive is kernel_p:
            results = run(eqn.params, given)
        elif inner is not None:
            open_, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            results = _evaluated(open_, consts, given, run)
        else:
            results = _jax.bind_again(eqn, given)
        values.update(zip(eqn.outvars, results, strict=True))
    return [np.asarray(read(x)) for x in jaxpr.outvars]
