# SPDX-License-Identifier: Apache-2.0
"""Pure operations without a row in `arithmetic.py`, evaluated by JAX on the CPU.

A compiled call takes about as long as ten operations of NumPy: operations that many
kernels use, and those that XLA's CPU backend does not compute as a GPU does, are rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_gpu import _jax
from pallas_gpu.emulator.engine.pure import narrow
from pallas_gpu.primitives import _registry as registry


def functions(eqn: Any) -> list[Callable[..., Any]] | None:
    """Returns a function of the operands for each result of an equation.

    None if the operation is not a pure one that kernels support.
    """
    if eqn.primitive.name == "optimization_barrier":
        return [_operand(i) for i in range(len(eqn.outvars))]
    kinds = (registry.RuleKind.COMPOSITE, registry.RuleKind.EMIT)
    supported = any(registry.rule(eqn.primitive, kind) for kind in kinds)
    if eqn.effects or not supported:
        return None
    return [_function(eqn, i) for i in range(len(eqn.outvars))]


def _operand(i: int) -> Callable[..., Any]:
    return lambda *operands: operands[i]


def _function(eqn: Any, i: int) -> Callable[..., Any]:
    eqn = eqn.replace(params={k: _in_bytes(x) for k, x in eqn.params.items()})

    @jax.jit
    def compiled(*operands: Any) -> Any:
        return _jax.bind_again(eqn, list(operands))[i]

    wanted = eqn.outvars[i].aval.dtype

    def function(*operands: Any) -> Any:
        # XLA's CPU backend aborts the process in some operations on packed integers,
        # e.g. concatenate (jax 0.11.2).
        wide = [x.astype(_held(x.dtype)) for x in map(np.asarray, operands)]
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            result = np.asarray(compiled(*wide))
        if narrow.is_integer(wanted):
            result = result.astype(wanted)
        return result[()] if result.ndim == 0 else result

    return function


def _held(dtype: Any) -> Any:
    return narrow.held(dtype) if narrow.is_integer(dtype) else dtype


def _in_bytes(param: Any) -> Any:
    """Returns a parameter; a function of packed integers as one of bytes."""
    if not isinstance(param, _jax.Jaxpr):
        return param
    avals = [v.aval for v in param.invars]
    if not any(narrow.is_integer(aval.dtype) for aval in avals):
        return param
    wide = [jax.ShapeDtypeStruct(aval.shape, _held(aval.dtype)) for aval in avals]
    return jax.make_jaxpr(lambda *x: _jax.eval_jaxpr(param, (), *x))(*wide).jaxpr
