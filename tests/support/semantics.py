# SPDX-License-Identifier: Apache-2.0
"""The same kernels under other semantics than they were written for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

import pallas_gpu as plgpu
from pallas_gpu.entry import call

Lane = plgpu.LoweringSemantics.Lane
Warpgroup = plgpu.LoweringSemantics.Warpgroup
BOTH = (Lane, Warpgroup)


def under(semantics: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose kernels are lowered under other semantics."""

    def changed(*args):
        return Traced(fn, args).under(semantics)(*args)

    return changed


class Traced:
    """A function traced once, whose kernels are lowered under several semantics."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]):
        self._closed, self._shape = jax.make_jaxpr(fn, return_shape=True)(*args)

    def under(self, semantics: Any) -> Callable[..., Any]:
        """Returns the function of arguments like those that it was traced with."""
        closed, shape = self._closed, self._shape
        replaced = _replace(closed.jaxpr, semantics)

        def changed(*args):
            out = jax.core.eval_jaxpr(replaced, closed.consts, *jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shape), out)

        return changed


def _replace(jaxpr: Any, semantics: Any) -> Any:
    """Returns the jaxpr with the parameters of its kernels replaced."""
    equations = []
    for eqn in jaxpr.eqns:
        params = dict(eqn.params)
        if eqn.primitive is call.kernel_p:
            params["compiler_params"] = dataclasses.replace(
                params["compiler_params"], lowering_semantics=semantics
            )
        else:
            for name, value in params.items():
                if isinstance(value, core.ClosedJaxpr):
                    inner = _replace(value.jaxpr, semantics)
                    params[name] = value.replace(jaxpr=inner)
        equations.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=equations)
