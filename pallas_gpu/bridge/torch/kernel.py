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
from pallas_gpu.bridge.torch import code, tensors
from pallas_gpu.bridge.torch.plan import Plan, plan
from pallas_gpu.bridge.torch.run import Program
from pallas_gpu.entry import assumed_target, scope

Types = tuple[jax.ShapeDtypeStruct, ...]
# Positions of the flat arguments whose derivatives are asked for.
Wanted = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function for one combination of types.

    Attributes:
      plan: what it does.
      tree: the structure of its results.
    """

    plan: Plan
    tree: Any


@dataclasses.dataclass(frozen=True)
class Pair:
    """A function with derivatives: the forward pass returns results, then residuals.

    Attributes:
      forward: from arguments.
      backward: from residuals, then the results' cotangents, to those that are wanted.
      results: number of results.
      tree: their structure.
    """

    forward: Plan
    backward: Plan
    results: int
    tree: Any


@dataclasses.dataclass(frozen=True)
class _Entry:
    """What a call needs: the program, the result's structure, and its GPU or None."""

    program: Program
    rebuild: Callable[[list[torch.Tensor]], Any]
    gpu: int | None


class TorchKernel:
    """A function of tensors, made by `as_torch_kernel`.

    Args:
      fn: the function of arrays.
      inout_argnums: arguments that it takes as references.
      in_types: the only types that it takes, a pytree for each argument.
      name: what errors call it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        inout_argnums: Sequence[int] = (),
        *,
        in_types: Any = None,
        name: str = "as_torch_kernel",
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._inout = fn, frozenset(inout_argnums)
        self._in_types, self._name = in_types, name
        self._lock = threading.RLock()
        self.unload()

    def unload(self) -> None:
        """Releases all that is compiled; a later call compiles again."""
        self._entries: dict[Any, _Entry] = {}
        self._traces: dict[Any, Any] = {}
        self._programs: dict[Any, Program] = {}

    def __call__(self, *args: Any) -> Any:
        """Runs the function; see `as_torch_kernel`."""
        if torch.compiler.is_compiling():
            return _outside_of_graphs(self, args)
        leaves, tree = args, None
        for x in args:
            if not isinstance(x, torch.Tensor):
                leaves, tree = jax.tree.flatten(args)
                break
        try:
            key = (tree, *[(x.shape, x.dtype, x.device) for x in leaves])
        except AttributeError:
            self._types(leaves)  # raises
            raise
        entry = self._entries.get(key)
        if entry is None:
            with self._lock:
                entry = self._entries[key] = self._entry(leaves, tree)
        differentiated = False
        for i, x in enumerate(leaves):
            if x.data_ptr() & 15 or not x.is_contiguous():
                tensors.refuse_memory(x, self._what(i))
            differentiated = differentiated or x.requires_grad
        if differentiated and torch.is_grad_enabled():
            return self._differentiated(leaves, tree)
        return entry.rebuild(run(entry.program, entry.gpu, leaves))

    # --- what is compiled -------------------------------------------------------------

    def _entry(self, leaves: Sequence[torch.Tensor], tree: Any) -> _Entry:
        types, device = self._types(leaves), self._device(leaves)
        tree = jax.tree.structure(types) if tree is None else tree
        self._require_types(types, tree)
        traced = self.traced(types, tree, target_of(device))
        program = self.program(traced.plan, device)
        if traced.tree == jax.tree.structure(0):
            return _Entry(program, lambda results: results[0], device.index)
        return _Entry(program, traced.tree.unflatten, device.index)

    def traced(self, types: Types, tree: Any, target: arch.GpuTarget | None) -> Traced:
        """Returns the function for types; it is traced once for each."""
        return self._kept(
            (types, tree, target), lambda: self._trace(types, tree, target)
        )

    def pair(
        self, types: Types, tree: Any, target: arch.GpuTarget | None, wanted: Wanted
    ) -> Pair:
        """Returns the function with derivatives for some of its arguments.

        Raises:
          UnsupportedError: it updates arguments.
          DifferentiationError: JAX cannot differentiate it.
        """
        key = types, tree, target, wanted
        return self._kept(key, lambda: self._trace_pair(*key))

    def program(self, planned: Plan, device: torch.device) -> Program:
        """Returns a plan's program on a device; it is compiled once."""
        key = planned, device
        if key not in self._programs:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise errors.UnsupportedError(
                    f"{self._name}: the first call for these types compiles, which a "
                    "CUDA graph cannot capture",
                    expected="a call with such arguments before the capture",
                    got="torch.cuda.graph",
                    hint="call the function once before torch.cuda.graph(...)",
                )
            target = target_of(device)
            self._programs[key] = Program(planned, device, target)
        return self._programs[key]

    def _kept(self, key: Any, make: Callable[[], Any]) -> Any:
        key = tuple((x.shape, x.dtype) for x in key[0]), *key[1:]
        with self._lock:
            if key not in self._traces:
                self._traces[key] = make()
            return self._traces[key]

    def _trace(self, types: Types, tree: Any, target: arch.GpuTarget | None) -> Traced:
        found: list[Any] = []
        positions = self._updated(tree)

        def flat(*leaves: Any) -> list[Any]:
            leaves = tuple(
                jax.new_ref(x) if i in positions else x for i, x in enumerate(leaves)
            )
            results, structure = jax.tree.flatten(
                scope.call(self._name, self._fn, *jax.tree.unflatten(tree, leaves))
            )
            found.append(structure)
            return [*results, *(leaves[i][...] for i in positions)]

        with jax.disable_jit(False), _tracing(target):
            closed = jax.make_jaxpr(flat)(*types)
            first = len(closed.out_avals) - len(positions)
            finals = {i: first + k for k, i in enumerate(positions)}
            return Traced(plan(closed, finals), found[-1])

    def _updated(self, tree: Any) -> list[int]:
        """Positions of the leaves of arguments that are references."""
        marked = [
            jax.tree.map(lambda _, i=i: i in self._inout, x)
            for i, x in enumerate(jax.tree.unflatten(tree, range(tree.num_leaves)))
        ]
        missing = [i for i in self._inout if i >= len(marked)]
        if missing:
            raise errors.ArgumentError(
                f"{self._name}: inout_argnums has a position without an argument",
                expected=f"positions below {len(marked)}",
                got=missing[0],
                hint="pass the argument, or leave the position out",
            )
        return [i for i, x in enumerate(jax.tree.leaves(marked)) if x]

    def _trace_pair(
        self, types: Types, tree: Any, target: arch.GpuTarget | None, wanted: Wanted
    ) -> Pair:
        found: list[Any] = []
        if self._inout or self.traced(types, tree, target).plan.updated:
            raise errors.UnsupportedError(
                f"{self._name}: the function updates an argument, and torch asks for "
                "its derivative",
                expected="a function of arrays that returns its results",
                got="an argument with requires_grad",
                hint="call it under torch.no_grad(), or on x.detach()",
            )

        def forward(*leaves: Any) -> list[Any]:
            def of_wanted(*some: Any) -> Any:
                every = list(leaves)
                for i, x in zip(wanted, some, strict=True):
                    every[i] = x
                return scope.call(
                    self._name, self._fn, *jax.tree.unflatten(tree, every)
                )

            results, pull = jax.vjp(of_wanted, *(leaves[i] for i in wanted))
            flat, structure = jax.tree.flatten(results)
            residuals, pulling = jax.tree.flatten(pull)
            found[:] = [structure, len(flat), pulling]
            return [*flat, *residuals]

        with jax.disable_jit(False), _tracing(target):
            closed = jax.make_jaxpr(forward)(*types)
            structure, count, pulling = found
            outs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed.out_avals]

            def backward(*given: Any) -> Any:
                residuals, cotangents = _split(given, len(outs) - count)
                flat = [
                    ct
                    if jax.dtypes.issubdtype(out.dtype, np.inexact)
                    else np.zeros(out.shape, jax.dtypes.float0)
                    for ct, out in zip(cotangents, outs, strict=False)
                ]
                pull = jax.tree.unflatten(pulling, residuals)
                return pull(jax.tree.unflatten(structure, flat))

            pulled = jax.make_jaxpr(backward)(*outs[count:], *outs[:count])
            return Pair(
                plan(closed, {}, may_update=False),
                plan(pulled, {}, may_update=False),
                count,
                structure,
            )

    # --- checks -----------------------------------------------------------------------

    def _what(self, i: int) -> str:
        return f"{self._name}: argument {i}"

    def _types(self, leaves: Sequence[Any]) -> Types:
        return tuple(tensors.type_of(x, self._what(i)) for i, x in enumerate(leaves))

    def _device(self, leaves: Sequence[torch.Tensor]) -> torch.device:
        if not leaves:
            index = torch.cuda.current_device() if torch.cuda.is_available() else None
            return torch.device("cpu" if index is None else "cuda", index)
        device = leaves[0].device
        other = [i for i, x in enumerate(leaves) if x.device != device]
        if other or device.type not in ("cpu", "cuda"):
            raise errors.ArgumentError(
                f"{self._what(other[0] if other else 0)} is on a device where it "
                "cannot be",
                expected=f"{device}, as argument 0" if other else "cuda or cpu",
                got=leaves[other[0]].device if other else device,
                hint="x.to(device) copies it",
            )
        return device

    def _require_types(self, types: Types, tree: Any) -> None:
        """Raises for arguments of other types than those that were declared."""
        if self._in_types is None:
            return
        expected, structure = jax.tree.flatten(tuple(self._in_types))
        if tree != structure:
            raise errors.ArgumentTypeError(
                f"{self._name}: the arguments have another structure",
                expected=structure,
                got=tree,
                hint="pass tensors where the declared types are",
            )
        for i, (x, wanted) in enumerate(zip(types, expected, strict=True)):
            if x.shape != tuple(wanted.shape):
                raise errors.ShapeError(
                    f"{self._what(i)} has another shape",
                    expected=tuple(wanted.shape),
                    got=x.shape,
                    hint="make a kernel for each shape",
                )
            if x.dtype != np.dtype(wanted.dtype):
                raise errors.DTypeError(
                    f"{self._what(i)} has another dtype",
                    expected=np.dtype(wanted.dtype).name,
                    got=x.dtype.name,
                    hint="x.to(dtype) converts it",
                )

    # --- derivatives ------------------------------------------------------------------

    def _differentiated(self, leaves: Sequence[torch.Tensor], tree: Any) -> Any:
        types, device = self._types(leaves), leaves[0].device
        tree = jax.tree.structure(types) if tree is None else tree
        wanted = tuple(i for i, x in enumerate(leaves) if x.requires_grad)
        pair = self.pair(types, tree, target_of(device), wanted)
        forward = self.program(pair.forward, device)
        backward = self.program(pair.backward, device)
        results = _Derivative.apply(pair, wanted, forward, backward, *leaves)
        return pair.tree.unflatten(results)

    def custom_op(self, name: str, *example: torch.Tensor) -> Callable[..., Any]:
        """Registers the function with torch; see `as_torch_kernel`."""
        from pallas_gpu.bridge.torch.custom import custom_op

        return custom_op(self, name, example)


class _Derivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pair, wanted, forward, backward, *leaves):
        values = run(forward, leaves[0].device.index, leaves)
        results, residuals = _split(values, pair.results)
        ctx.save_for_backward(*residuals)
        ctx.wanted, ctx.backward, ctx.count = wanted, backward, len(leaves)
        exact = [x for x in results if not x.is_floating_point()]
        ctx.mark_non_differentiable(*exact)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *cotangents):
        given = [*ctx.saved_tensors, *map(aligned, cotangents)]
        gradients = run(ctx.backward, given[0].device.index, given)
        every: list[Any] = [None] * ctx.count
        for i, x in zip(ctx.wanted, gradients, strict=True):
            every[i] = x
        return (None, None, None, None, *every)


def run(
    program: Program, gpu: int | None, leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Runs a program on its GPU, or on the CPU."""
    if gpu is None:
        return program(leaves)
    if not hasattr(_THREAD, "has_context"):
        # Only the CUDA runtime makes a device's context current in a new thread.
        torch.cuda.Event().record()
        _THREAD.has_context = True
    if torch.cuda.is_current_stream_capturing():
        # A graph has the addresses of constants and of code.
        _CAPTURED.add(program)
    if gpu == torch.cuda.current_device():
        return program(leaves)
    with torch.cuda.device(gpu):
        return program(leaves)


_THREAD = threading.local()
_CAPTURED: set[Program] = set()


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that a kernel can take, a copy if necessary."""
    x = x.detach().contiguous()
    return x.clone() if x.data_ptr() % tensors.ALIGNMENT_BYTES else x


def _split(values: Sequence[Any], at: int) -> tuple[list[Any], list[Any]]:
    return list(values[:at]), list(values[at:])


def target_of(device: torch.device) -> arch.GpuTarget | None:
    return None if device.type == "cpu" else code.target_of(device.index)


def _tracing(target: arch.GpuTarget | None) -> Any:
    if target is None:
        return contextlib.nullcontext()
    return assumed_target.assuming(target)


@torch.compiler.disable
def _outside_of_graphs(kernel: TorchKernel, args: Sequence[Any]) -> Any:
    return kernel(*args)
