# SPDX-License-Identifier: Apache-2.0
"""Functions of tensors: traced once for each combination of types, then called."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from pallas_gpu import errors
from pallas_gpu.bridge.torch import tensors
from pallas_gpu.bridge.torch.custom import custom_op
from pallas_gpu.bridge.torch.plan import Plan
from pallas_gpu.bridge.torch.run import Program, target_of
from pallas_gpu.bridge.torch.traces import Traces, Types
from pallas_gpu.entry import scope


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
        self._traces = Traces(fn, inout_argnums)
        self._lock = threading.RLock()
        self.unload()

    def unload(self) -> None:
        """Releases what is compiled; see `TorchFunction`."""
        # By types and devices: what runs, and what makes a pytree of its results.
        self._entries: dict[Any, tuple[Any, Callable[[Any], Any]]] = {}
        self._traces.clear()
        self._programs: dict[Any, Program] = {}

    def __call__(self, *args: Any) -> Any:
        """Runs the function; see `TorchFunction`."""
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._call)(args)
        return self._call(args)

    def _call(self, args: Sequence[Any]) -> Any:
        with errors.at(scope.called_at):
            return self._run(args)

    def _run(self, args: Sequence[Any]) -> Any:
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
                tensors.require_order(x, self._what(i))
        run, rebuild = entry
        return rebuild(run(leaves))

    def custom_op(self, name: str, *example: torch.Tensor) -> Callable[..., Any]:
        """Registers the function with torch; see `TorchFunction`."""
        with errors.at(scope.called_at):
            return custom_op(name, example, self, self._traces, self.program)

    # --- what is compiled -------------------------------------------------------------

    def _entry(self, leaves: Sequence[Any], tree: Any, enabled: bool) -> Any:
        types, device = self._types(leaves), self._device(leaves)
        tree = jax.tree.structure(types) if tree is None else tree
        wanted = tuple(i for i, x in enumerate(leaves) if enabled and x.requires_grad)
        traced = self._traces.get(types, tree, target_of(device), wanted)
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
