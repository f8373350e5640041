# SPDX-License-Identifier: Apache-2.0
"""Functions of tensors: traced once for each combination of types, then called."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from pallas_gpu import arch, errors
from pallas_gpu.bridge.torch import tensors
from pallas_gpu.bridge.torch.plan import Plan, plan
from pallas_gpu.bridge.torch.run import Program, target_of
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


class TorchKernel:
    """A function of tensors, made by `as_torch_kernel`.

    Args:
      fn: the function of arrays.
      inout_argnums: arguments that it takes as references.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        inout_argnums: Sequence[int] = (),
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._inout = fn, frozenset(inout_argnums)
        self._lock = threading.RLock()
        self.unload()

    def unload(self) -> None:
        """Releases all that is compiled; a later call compiles again."""
        # By types and devices: what runs, and what makes a pytree of its results.
        self._entries: dict[Any, tuple[Any, Callable[[Any], Any]]] = {}
        self._traces: dict[Any, Traced] = {}
        self._programs: dict[Any, Program] = {}

    def __call__(self, *args: Any) -> Any:
        """Runs the function; see `as_torch_kernel`."""
        if torch.compiler.is_compiling():
            return _outside_of_graphs(self, args)
        try:
            return self._call(args)
        except errors.PallasGpuError as error:
            raise error.with_location(scope.called_at()) from None

    def _call(self, args: Sequence[Any]) -> Any:
        leaves, tree = args, None
        for x in args:
            if not isinstance(x, torch.Tensor):
                leaves, tree = jax.tree.flatten(args)
                self._types(leaves)
                break
        enabled = torch.is_grad_enabled()
        key = (
            tree,
            *[
                (x.shape, x.dtype, x.device, enabled and x.requires_grad)
                for x in leaves
            ],
        )
        entry = self._entries.get(key)
        if entry is None:
            with self._lock:
                entry = self._entries[key] = self._entry(leaves, tree, enabled)
        for i, x in enumerate(leaves):
            if x.data_ptr() & 15 or not x.is_contiguous():
                tensors.refuse_memory(x, self._what(i))
        run, rebuild = entry
        return rebuild(run(leaves))

    def custom_op(self, name: str, *example: torch.Tensor) -> Callable[..., Any]:
        """Registers the function with torch; see `as_torch_kernel`."""
        from pallas_gpu.bridge.torch.custom import custom_op

        return custom_op(self, name, example)

    # --- what is compiled -------------------------------------------------------------

    def _entry(self, leaves: Sequence[Any], tree: Any, enabled: bool) -> Any:
        types, device = self._types(leaves), self._device(leaves)
        tree = jax.tree.structure(types) if tree is None else tree
        wanted = tuple(i for i, x in enumerate(leaves) if enabled and x.requires_grad)
        traced = self.traced(types, tree, target_of(device), wanted)
        run: Any = self.program(traced.forward, device)
        if traced.backward is not None:
            backward = self.program(traced.backward, device)
            run = functools.partial(_derivative, run, backward, traced.count, wanted)
        if traced.tree == jax.tree.structure(0):
            return run, lambda results: results[0]
        return run, traced.tree.unflatten

    def program(self, planned: Plan, device: torch.device) -> Program:
        """Returns a plan's program on a device; it is compiled once."""
        key = planned, device
        if key not in self._programs:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise errors.UnsupportedError(
                    "as_torch_kernel: the first call for these types compiles, which a "
                    "CUDA graph cannot capture",
                    expected="a call with such arguments before the capture",
                    got="torch.cuda.graph",
                    hint="call the function once before torch.cuda.graph(...)",
                )
            self._programs[key] = Program(planned, device)
        return self._programs[key]

    def traced(
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
                assumed = contextlib.nullcontext()
                if target is not None:
                    assumed = assumed_target.assuming(target)
                with jax.disable_jit(False), assumed:
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
        avals, count = closed.out_avals, structure.num_leaves
        outs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]

        def backward(*given: Any) -> Any:
            cotangents = [
                ct
                if jax.dtypes.issubdtype(ct.dtype, np.inexact)
                else np.zeros(ct.shape, jax.dtypes.float0)
                for ct in given[-count:]
            ]
            pull = jax.tree.unflatten(pulling, given[:-count])
            return pull(jax.tree.unflatten(structure, cotangents))

        pulled = jax.make_jaxpr(backward)(*outs[count:], *outs[:count])
        plans = (plan(x, (), may_update=False) for x in (closed, pulled))
        return Traced(next(plans), structure, next(plans))

    # --- checks -----------------------------------------------------------------------

    def _what(self, i: int) -> str:
        return f"as_torch_kernel: argument {i}"

    def _types(self, leaves: Sequence[Any]) -> Types:
        return tuple(tensors.type_of(x, self._what(i)) for i, x in enumerate(leaves))

    def _device(self, leaves: Sequence[torch.Tensor]) -> torch.device:
        if not leaves:
            has_gpu = torch.cuda.is_available()
            index = torch.cuda.current_device() if has_gpu else 0
            return torch.device("cuda", index) if has_gpu else torch.device("cpu")
        device = leaves[0].device
        other = next((i for i, x in enumerate(leaves) if x.device != device), 0)
        if other or device.type not in ("cpu", "cuda"):
            raise errors.ArgumentError(
                f"{self._what(other)} is on a device where it cannot be",
                expected=f"{device}, as argument 0" if other else "cuda or cpu",
                got=leaves[other].device,
                hint="x.to(device) copies it",
            )
        return device


class _Derivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, count, wanted, *leaves):
        values = forward(leaves)
        results = values[:count]
        ctx.save_for_backward(*values[count:])
        ctx.of, ctx.run, ctx.n = wanted, backward, len(leaves)
        exact = [x for x in results if not x.is_floating_point()]
        ctx.mark_non_differentiable(*exact)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *cotangents):
        given = [*ctx.saved_tensors, *map(tensors.aligned, cotangents)]
        found = dict(zip(ctx.of, ctx.run(given), strict=True))
        return (None, None, None, None, *map(found.get, range(ctx.n)))


def _derivative(forward, backward, count, wanted, leaves):
    return _Derivative.apply(forward, backward, count, wanted, *leaves)


@torch.compiler.disable
def _outside_of_graphs(kernel: TorchKernel, args: Sequence[Any]) -> Any:
    return kernel(*args)
