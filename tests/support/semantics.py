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
    """A function traced once, whose kernels run and are lowered in several ways.

    Attributes:
      as_traced: the function with its kernels' own parameters.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]):
        self._closed, self._shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        self.as_traced = self._function(self._closed)

    def under(self, semantics: Any) -> Callable[..., Any]:
        """Returns the function of arguments like those that it was traced with."""
        return self._function(self.lowered_under(semantics))

    def on_gpu(self, semantics: Any) -> Callable[..., Any]:
        """As `under`, without parameters for the emulator."""
        return self._function(self.lowered_under(semantics, interpret=None))

    def lowered_under(self, semantics: Any, **changes: Any) -> core.ClosedJaxpr:
        """Returns the program, whose kernels are to be lowered under some semantics.

        Args:
          semantics: of all kernels.
          changes: other parameters of theirs.
        """
        jaxpr = _replace(self._closed.jaxpr, semantics, changes)
        return self._closed.replace(jaxpr=jaxpr)

    def _function(self, closed: core.ClosedJaxpr) -> Callable[..., Any]:
        tree = jax.tree.structure(self._shape)

        def changed(*args):
            leaves = jax.tree.leaves(args)
            out = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves)
            return jax.tree.unflatten(tree, out)

        return changed


def _replace(jaxpr: Any, semantics: Any, changes: dict[str, Any]) -> Any:
    """Returns the jaxpr with its kernels under some semantics, and other parameters."""
    equations = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is call.kernel_p:
            compiler_params = dataclasses.replace(
                eqn.params["compiler_params"], lowering_semantics=semantics
            )
            params = eqn.params | changes | {"compiler_params": compiler_params}
        else:
            params = {k: _within(v, semantics, changes) for k, v in eqn.params.items()}
        equations.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=equations)


def _within(value: Any, semantics: Any, changes: dict[str, Any]) -> Any:
    """Returns a parameter of an equation with the kernels of its bodies changed."""
    if isinstance(value, core.ClosedJaxpr):
        return value.replace(jaxpr=_replace(value.jaxpr, semantics, changes))
    if isinstance(value, tuple) and any(isinstance(x, core.ClosedJaxpr) for x in value):
        return tuple(_within(x, semantics, changes) for x in value)
    return value
