# SPDX-License-Identifier: Apache-2.0
"""Plans of a function and of its derivatives, one for each combination of types."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import arch, errors
from pallas_gpu.bridge.torch.plan import Plan, plan
from pallas_gpu.entry import assumed_target, scope

Types = tuple[jax.ShapeDtypeStruct, ...]
# Positions of the flat arguments whose derivatives are asked for.
Wanted = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function for one combination of types.

    Attributes:
      forward: from arguments to results, then residuals if derivatives are wanted.
      tree: the structure of the results.
      backward: from residuals, then cotangents, to the derivatives that are wanted.
    """

    forward: Plan
    tree: Any
    backward: Plan | None = None

    @property
    def count(self) -> int:
        """Number of results."""
        return self.tree.num_leaves


class Traces:
    """A function of arrays, as plans.

    Args:
      fn: the function.
      references: arguments that it takes as references.
    """

    def __init__(self, fn: Callable[..., Any], references: Sequence[int]):
        self._fn, self._inout = fn, frozenset(references)
        self._lock = threading.RLock()
        self._traces: dict[Any, Traced] = {}

    def clear(self) -> None:
        """Forgets all plans."""
        self._traces = {}

    def get(
        self,
        types: Types,
        tree: Any,
        target: arch.GpuTarget | None,
        wanted: Wanted = (),
    ) -> Traced:
        """Returns the function for some types; it is traced once for each.

        Raises:
          UnsupportedError: an operation has no counterpart in torch, or derivatives are
            wanted of a function that updates arguments.
          DifferentiationError: JAX cannot differentiate it.
        """
        key = tuple((x.shape, x.dtype) for x in types), tree, target, wanted
        with self._lock:
            if key not in self._traces:
                trace = self._trace_pair if wanted else self._trace
                with jax.disable_jit(False), _for(target):
                    self._traces[key] = trace(types, tree, wanted)
            return self._traces[key]

    def _run(self, tree: Any, leaves: Sequence[Any]) -> Any:
        args = jax.tree.unflatten(tree, leaves)
        return scope.call("as_torch_kernel", self._fn, *args)

    def _trace(self, types: Types, tree: Any, _: Wanted) -> Traced:
        found: list[Any] = []
        positions = self._references(tree)

        def flat(*leaves: Any) -> list[Any]:
            given = [
                jax.new_ref(x) if i in positions else x for i, x in enumerate(leaves)
            ]
            results, structure = jax.tree.flatten(self._run(tree, given))
            found[:] = [structure]
            return [*results, *(given[i][...] for i in positions)]

        closed = jax.make_jaxpr(flat)(*types)
        return Traced(plan(closed, positions), found[0])

    def _references(self, tree: Any) -> list[int]:
        """Positions of the leaves of arguments that are references."""
        args = jax.tree.unflatten(tree, range(tree.num_leaves))
        missing = [i for i in self._inout if i >= len(args)]
        if missing:
            raise errors.ArgumentError(
                "as_torch_kernel: inout_argnums has a position without an argument",
                expected=f"positions below {len(args)}",
                got=missing[0],
                hint="pass the argument, or leave the position out",
            )
        return sorted(i for k in self._inout for i in jax.tree.leaves(args[k]))

    def _trace_pair(self, types: Types, tree: Any, wanted: Wanted) -> Traced:
        found: list[Any] = []
        if self._inout or self._trace(types, tree, ()).forward.updated:
            raise errors.UnsupportedError(
                "as_torch_kernel: the function updates an argument, and torch asks for "
                "its derivative",
                expected="a function of arrays that returns its results",
                got="an argument with requires_grad",
                hint="call it under torch.no_grad(), or on x.detach()",
            )

        def forward(*leaves: Any) -> list[Any]:
            def of_wanted(*some: Any) -> Any:
                new = dict(zip(wanted, some, strict=True))
                return self._run(tree, [new.get(i, x) for i, x in enumerate(leaves)])

            results, pull = jax.vjp(of_wanted, *(leaves[i] for i in wanted))
            flat, structure = jax.tree.flatten(results)
            residuals, pulling = jax.tree.flatten(pull)
            found[:] = [structure, pulling]
            return [*flat, *residuals]

        closed = jax.make_jaxpr(forward)(*types)
        structure, pulling = found
        outs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed.out_avals]
        count = structure.num_leaves
        saved = len(outs) - count

        def backward(*given: Any) -> Any:
            cotangents = [
                ct
                if jax.dtypes.issubdtype(ct.dtype, np.inexact)
                else np.zeros(ct.shape, jax.dtypes.float0)
                for ct in given[saved:]
            ]
            pull = jax.tree.unflatten(pulling, given[:saved])
            return pull(jax.tree.unflatten(structure, cotangents))

        pulled = jax.make_jaxpr(backward)(*outs[count:], *outs[:count])
        plans = (plan(x, (), may_update=False) for x in (closed, pulled))
        return Traced(next(plans), structure, next(plans))


def _for(target: arch.GpuTarget | None) -> contextlib.AbstractContextManager[None]:
    return assumed_target.assuming(target) if target else contextlib.nullcontext()
