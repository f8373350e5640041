# SPDX-License-Identifier: Apache-2.0
"""Registration with `torch.library`: operations that `torch.compile` keeps.

A function becomes up to three operations: `name`; `name_forward`, which returns what
the backward pass needs, too; and `name_backward`. An operation may not return what it
was given: results that are arguments are put in their places outside of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from pallas_gpu import errors
from pallas_gpu.bridge.torch import tensors
from pallas_gpu.bridge.torch.kernel import Pair, TorchKernel, aligned, run, target_of
from pallas_gpu.bridge.torch.plan import Plan, Slot


def custom_op(
    kernel: TorchKernel, name: str, example: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """Registers a function of tensors as `name`; returns the function that calls it.

    Raises:
      ArgumentError: arguments or results are not tensors one by one.
    """
    plan, tree, _ = _traced(kernel, example)
    single = tree == jax.tree.structure(0)
    if not single and tree != jax.tree.structure((0,) * tree.num_leaves):
        raise errors.ArgumentError(
            f"custom_op {name}: the result is not a tensor or a tuple of tensors",
            expected="a tensor, or a tuple of them",
            got=tree,
            hint="return a flat tuple",
        )
    # The result is the argument itself, updated or not.
    given = {
        k: x.argument for k, x in enumerate(_present(plan)) if x.argument is not None
    }
    plain = _plain(kernel, name, plan, set(given))
    forward = None if plan.updated else _with_derivative(kernel, name)

    def call(*xs: torch.Tensor) -> Any:
        if (
            forward is not None
            and torch.is_grad_enabled()
            and any(x.requires_grad for x in xs)
        ):
            wanted = [x.requires_grad for x in xs]
            results = forward(list(xs), wanted)[: len(plan.results)]
        else:
            made = iter(_unpacked(plain(*xs)))
            results = [
                xs[given[k]] if k in given else next(made)
                for k in range(len(plan.results))
            ]
        return results[0] if single else tuple(results)

    return call


def _present(plan: Plan) -> list[Slot]:
    """The slots of the results, of those that are arguments in the end these."""
    stored = {x: plan.arguments[i] for i, x in plan.stored.items()}
    found = []
    for x in plan.results:
        slot = stored.get(x, x)
        memory = slot.memory
        whole = memory.argument is not None and slot.shape == memory.shape
        found.append(memory if whole and memory.argument in plan.updated else slot)
    return found


def _traced(kernel: TorchKernel, xs: Sequence[torch.Tensor]) -> tuple[Plan, Any, Any]:
    types = tuple(tensors.type_of(x, f"argument {i}") for i, x in enumerate(xs))
    tree = jax.tree.structure(types)
    traced = kernel.traced(types, tree, _target_of(xs))
    return traced.plan, traced.tree, types


def _target_of(xs: Sequence[torch.Tensor]) -> Any:
    device = xs[0].device if xs else torch.device("cpu")
    return target_of(device) if device.type == "cuda" else None


def _plain(kernel: TorchKernel, name: str, plan: Plan, given: set[int]) -> Any:
    names = [f"x{i}" for i in range(len(plan.arguments))]
    updated = tuple(names[i] for i in sorted(plan.updated))
    declared = [
        f"Tensor(a{i}!) {x}" if x in updated else f"Tensor {x}"
        for i, x in enumerate(names)
    ]
    count = len(plan.results) - len(given)
    returned = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    schema = f"({', '.join(declared)}) -> {returned}"

    def select(values: Sequence[Any]) -> list[Any]:
        return [x for k, x in enumerate(values) if k not in given]

    def execute(*xs: torch.Tensor) -> Any:
        xs = tuple(x if i in plan.updated else aligned(x) for i, x in enumerate(xs))
        now, tree, _ = _traced(kernel, xs)
        if now.updated != plan.updated:
            raise errors.ArgumentError(
                f"{name}: these types update other arguments than the example",
                expected=sorted(plan.updated),
                got=sorted(now.updated),
                hint="register one operation for each",
            )
        with torch.no_grad():
            results = kernel(*xs)
        return _packed(_own(select(tree.flatten_up_to(results)), xs))

    def fake(*xs: torch.Tensor) -> Any:
        return _packed(_empty(select(_traced(kernel, xs)[0].results), xs))

    op = torch.library.custom_op(name, execute, mutates_args=updated, schema=schema)
    op.register_fake(fake)
    return op


def _packed(results: list[torch.Tensor]) -> Any:
    """Results as an operation returns them: none, one, or a tuple."""
    return (None, *results)[-1] if len(results) < 2 else tuple(results)


def _unpacked(results: Any) -> Sequence[torch.Tensor]:
    if results is None:
        return ()
    return (results,) if isinstance(results, torch.Tensor) else results


def _own(
    results: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Copies results that share memory with arguments."""
    given = {x.untyped_storage().data_ptr() for x in xs}
    return [
        x.clone() if x.untyped_storage().data_ptr() in given else x for x in results
    ]


def _empty(slots: Sequence[Slot], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    device = like[0].device if like else "cuda"
    return [
        torch.empty(
            x.shape, dtype=tensors.torch_dtype(x.dtype, "a result"), device=device
        )
        for x in slots
    ]


# --- derivatives ----------------------------------------------------------------------


def _with_derivative(kernel: TorchKernel, name: str) -> Any:
    def pair_of(xs: Sequence[Any], wanted: Sequence[bool], target: Any) -> Pair:
        types = tuple(tensors.type_of(x, f"argument {i}") for i, x in enumerate(xs))
        positions = tuple(i for i, x in enumerate(wanted) if x)
        return kernel.pair(types, jax.tree.structure(types), target, positions)

    def execute(xs: list[torch.Tensor], wanted: list[bool]) -> list[torch.Tensor]:
        xs = [aligned(x) for x in xs]
        pair = pair_of(xs, wanted, _target_of(xs))
        program = kernel.program(pair.forward, xs[0].device)
        with torch.no_grad():
            values = run(program, xs[0].device.index, xs)
        return _own(_made(pair, values), xs)

    def fake(xs: list[torch.Tensor], wanted: list[bool]) -> list[torch.Tensor]:
        pair = pair_of(xs, wanted, _target_of(xs))
        return _empty(_made(pair, pair.forward.results), xs)

    forward = torch.library.custom_op(
        f"{name}_forward", execute, mutates_args=(),
        schema="(Tensor[] xs, bool[] wanted) -> Tensor[]",
    )  # fmt: skip
    forward.register_fake(fake)

    def pull(
        saved: list[torch.Tensor], cotangents: list[torch.Tensor], types: str
    ) -> list[torch.Tensor]:
        given = [aligned(x) for x in (*saved, *cotangents)]
        pair = _decoded(kernel, types, _target_of(given))
        program = kernel.program(pair.backward, given[0].device)
        with torch.no_grad():
            return _own(run(program, given[0].device.index, given), given)

    def fake_pull(saved: Any, cotangents: Any, types: str) -> list[torch.Tensor]:
        given = [*saved, *cotangents]
        pair = _decoded(kernel, types, _target_of(given))
        return _empty(pair.backward.results, given)

    backward = torch.library.custom_op(
        f"{name}_backward", pull, mutates_args=(),
        schema="(Tensor[] saved, Tensor[] cotangents, str types) -> Tensor[]",
    )  # fmt: skip
    backward.register_fake(fake_pull)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        xs, wanted = inputs
        pair = pair_of(xs, wanted, _target_of(xs))
        made = iter(output[pair.results :])
        ctx.save_for_backward(
            *(
                next(made) if x.argument is None else xs[x.argument]
                for x in pair.forward.results[pair.results :]
            )
        )
        ctx.types, ctx.wanted = _encoded(xs, wanted), wanted
        ctx.like = [(x.shape, x.dtype, x.device) for x in output[: pair.results]]

    def formula(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Any:
        cotangents = [
            torch.zeros(like[0], dtype=like[1], device=like[2]) if x is None else x
            for x, like in zip(gradients, ctx.like, strict=False)
        ]
        found = iter(backward(list(ctx.saved_tensors), cotangents, ctx.types))
        return [next(found) if x else None for x in ctx.wanted], None

    forward.register_autograd(formula, setup_context=setup)
    return forward


def _made(pair: Pair, values: Sequence[Any]) -> list[Any]:
    """Results, then residuals that are not arguments, which the caller has."""
    kept = zip(
        pair.forward.results[pair.results :], values[pair.results :], strict=True
    )
    return [*values[: pair.results], *(x for slot, x in kept if slot.argument is None)]


def _encoded(xs: Sequence[torch.Tensor], wanted: Sequence[bool]) -> str:
    """The types of arguments as text, which a compiled graph can contain."""
    types = [tensors.type_of(x, f"argument {i}") for i, x in enumerate(xs)]
    return json.dumps(
        [[[list(x.shape), x.dtype.name] for x in types], [int(x) for x in wanted]]
    )


def _decoded(kernel: TorchKernel, text: str, target: Any) -> Pair:
    described, wanted = json.loads(text)
    types = tuple(jax.ShapeDtypeStruct(tuple(s), d) for s, d in described)
    positions = tuple(i for i, x in enumerate(wanted) if x)
    return kernel.pair(types, jax.tree.structure(types), target, positions)
