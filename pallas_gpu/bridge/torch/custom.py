# SPDX-License-Identifier: Apache-2.0
"""Registration with `torch.library`: operations that `torch.compile` keeps.

A function becomes one operation, and another one for its derivative. An operation may
not return what it was given: values that are arguments are left out of what it returns,
and its caller inserts them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from pallas_gpu import errors
from pallas_gpu.bridge.torch import tensors
from pallas_gpu.bridge.torch.plan import Plan
from pallas_gpu.bridge.torch.run import Program, target_of
from pallas_gpu.bridge.torch.traces import Traced, Traces

_Tensors = Sequence[torch.Tensor]


def custom_op(
    name: str,
    example: _Tensors,
    kernel: Callable[..., Any],
    traces: Traces,
    program: Callable[[Plan, torch.device], Program],
) -> Callable[..., Any]:
    """Registers a function of tensors as `name`; returns the function that calls it.

    Args:
      name: `library::name`.
      example: arguments.
      kernel: the function.
      traces: its plans.
      program: from a plan and a device to what runs it.
    """
    if not re.fullmatch(r"[\w.]+::[\w.]+", name):
        raise errors.ArgumentError(
            "custom_op: the name has no library",
            expected="library::name",
            got=name,
            hint='f.custom_op("my_library::product", a, b)',
        )
    operation = _Operation(name, traces, program)
    first = operation.traced(example)
    plan, container = first.forward, (first.tree.node_data() or (None,))[0]
    if first.tree.num_nodes != first.count + (container is not None) or (
        container not in (None, tuple, list)
    ):
        raise errors.ArgumentError(
            f"custom_op {name}: the result is not a tensor or a sequence of tensors",
            expected="a tensor, or a tuple or list of tensors",
            got=first.tree,
            hint="return a flat tuple",
        )
    call = _updating(operation, plan) if plan.updated else _functional(operation)
    given = plan.given

    def function(*xs: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling() and not _is_observed(xs):
            return kernel(*xs)  # as torch would, in a fifth of the time
        results = _values(given, call(xs), xs)
        return results[0] if container is None else container(results)

    return function


def _is_observed(xs: _Tensors) -> bool:
    """Whether a mode sees what happens to tensors, or they are not plain ones."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return bool(modes) or any(type(x) not in _REAL for x in xs)


_REAL = (torch.Tensor, torch.nn.Parameter)


@dataclasses.dataclass(frozen=True)
class _Operation:
    """What operations execute, and the types of what they return."""

    name: str
    traces: Traces
    program: Callable[[Plan, torch.device], Program]

    def traced(self, xs: _Tensors, wanted: Sequence[bool] = ()) -> Traced:
        return self.decoded(_encoded(xs, wanted), xs)

    def decoded(self, text: str, like: _Tensors) -> Traced:
        described, wanted = json.loads(text)
        types = tuple(jax.ShapeDtypeStruct(tuple(s), d) for s, d in described)
        positions = tuple(i for i, x in enumerate(wanted) if x)
        tree, target = jax.tree.structure(types), target_of(_device(like))
        return self.traces.get(types, tree, target, positions)

    def execute(self, plan: Plan, xs: _Tensors) -> list[torch.Tensor]:
        given = []
        for i, x in enumerate(xs):
            if i in plan.updated:
                tensors.require_order(x, f"{self.name}: argument {i}")
            given.append(x if i in plan.updated else tensors.aligned(x))
        with torch.no_grad():
            values = self.program(plan, _device(xs))(given)
        made = [x for x, i in zip(values, plan.given, strict=True) if i is None]
        # They may be views of arguments.
        own = {x.untyped_storage().data_ptr() for x in xs}
        return [x.clone() if x.untyped_storage().data_ptr() in own else x for x in made]

    def fake(self, plan: Plan, xs: _Tensors) -> list[torch.Tensor]:
        device = _device(xs)
        return [
            torch.empty(x.shape, dtype=tensors.torch_dtype(x.dtype), device=device)
            for x, i in zip(plan.results, plan.given, strict=True)
            if i is None
        ]


def _values(given: Sequence[int | None], made: _Tensors, xs: _Tensors) -> list[Any]:
    """Inserts arguments into what an operation returns."""
    rest = iter(made)
    return [next(rest) if i is None else xs[i] for i in given]


def _device(xs: _Tensors) -> torch.device:
    return xs[0].device if xs else torch.device("cpu")


def _encoded(xs: _Tensors, wanted: Sequence[bool]) -> str:
    """The types of arguments as text, which a compiled program can contain."""
    types = [tensors.type_of(x, f"custom_op: argument {i}") for i, x in enumerate(xs)]
    return json.dumps([[(x.shape, x.dtype.name) for x in types], list(wanted)])


def _updating(operation: _Operation, plan: Plan) -> Any:
    """Registers an operation that updates arguments, as its example does."""
    names = [f"x{i}" for i in range(len(plan.arguments))]
    updated = tuple(names[i] for i in plan.updated)
    declared = [
        f"Tensor(a{i}!) {x}" if x in updated else f"Tensor {x}"
        for i, x in enumerate(names)
    ]
    returned = ", ".join(["Tensor"] * plan.given.count(None))
    schema = f"({', '.join(declared)}) -> ({returned})"

    def execute(*xs: torch.Tensor) -> Any:
        now = operation.traced(xs).forward
        if now.updated != plan.updated or now.given != plan.given:
            raise errors.ArgumentError(
                f"{operation.name}: other arguments are updated than in the example",
                expected=plan.updated,
                got=now.updated,
                hint="register one operation for each",
            )
        return packed(operation.execute(now, xs))

    def fake(*xs: torch.Tensor) -> Any:
        return packed(operation.fake(operation.traced(xs).forward, xs))

    def packed(made: list[torch.Tensor]) -> Any:
        return (None, *made)[-1] if len(made) < 2 else tuple(made)

    op = torch.library.custom_op(
        operation.name, execute, mutates_args=updated, schema=schema
    )
    op.register_fake(fake)

    def call(xs: _Tensors) -> _Tensors:
        made = op(*xs)
        if made is None:
            return ()
        return (made,) if isinstance(made, torch.Tensor) else made

    return call


def _functional(operation: _Operation) -> Any:
    """Registers an operation with its derivative; residuals are further results."""
    forward = _registered(
        operation.name,
        "(Tensor[] xs, bool[] wanted) -> Tensor[]",
        lambda run, xs, wanted: run(operation.traced(xs, wanted).forward, xs),
        operation,
    )
    backward = _registered(
        f"{operation.name}_backward",
        "(Tensor[] given, str types) -> Tensor[]",
        lambda run, given, types: run(operation.decoded(types, given).backward, given),
        operation,
    )

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        xs, wanted = inputs
        traced = operation.traced(xs, wanted)
        values = _values(traced.forward.given, output, xs)
        ctx.save_for_backward(*values[traced.count :])
        ctx.wanted, ctx.types = wanted, _encoded(xs, wanted)
        # The caller inserts arguments itself: this formula gets no cotangents of them.
        ctx.results = [
            (x.shape, x.dtype, x.device, i is None)
            for x, i in zip(values[: traced.count], traced.forward.given, strict=False)
        ]

    def formula(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Any:
        made, cotangents = iter(gradients), []
        for shape, dtype, device, is_made in ctx.results:
            x = next(made) if is_made else None
            zeros = torch.zeros(shape, dtype=dtype, device=device) if x is None else x
            cotangents.append(zeros)
        given = [*ctx.saved_tensors, *cotangents]
        pulling = operation.decoded(ctx.types, given)
        assert pulling.backward is not None
        found = iter(_values(pulling.backward.given, backward(given, ctx.types), given))
        return [next(found) if x else None for x in ctx.wanted], None

    forward.register_autograd(formula, setup_context=setup)

    def call(xs: _Tensors) -> _Tensors:
        enabled = torch.is_grad_enabled()
        return forward(list(xs), [enabled and x.requires_grad for x in xs])

    return call


def _registered(name: str, schema: str, body: Any, operation: _Operation) -> Any:
    op = torch.library.custom_op(
        name,
        lambda *args: body(operation.execute, *args),
        mutates_args=(),
        schema=schema,
    )
    op.register_fake(lambda *args: body(operation.fake, *args))
    return op
