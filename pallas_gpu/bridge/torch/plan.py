# SPDX-License-Identifier: Apache-2.0
"""A function with kernels as a straight line of launches and operations of torch.

JAX's arrays are values, torch's are memory. A launch may update an operand in place if
nobody reads its old contents afterwards; else it gets a copy. What is constant is
evaluated here, by JAX, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from pallas_gpu import _jax, errors
from pallas_gpu.bridge.torch.operations import Operation, operation_for
from pallas_gpu.entry import call
from pallas_gpu.program.build import region_of
from pallas_gpu.program.nodes import Constant, Op, Operand, Region


@dataclasses.dataclass(eq=False)
class Slot:
    """An array of the function.

    Attributes:
      shape, dtype: its type.
      memory: the slot whose memory it has, itself if that is its own.
      argument: position among the arguments; None for others.
      constant: its value, if that is known.
    """

    shape: tuple[int, ...]
    dtype: Any
    memory: Slot = None  # type: ignore[assignment]
    argument: int | None = None
    constant: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.shape = tuple(self.shape)
        self.memory = self if self.memory is None else self.memory


@dataclasses.dataclass(eq=False)
class Step:
    """One thing that happens: a launch or an operation of torch.

    Attributes:
      reads: operands.
      makes: results.
      in_place: of a launch, positions (operand, result) that are one array.
      copied: those of its operands that are copied first.
    """

    does: call.CallParams | Operation
    reads: list[Slot]
    makes: list[Slot]
    in_place: dict[int, int] = dataclasses.field(default_factory=dict)
    copied: set[int] = dataclasses.field(default_factory=set)

    def updates(self) -> list[Slot]:
        """Returns the results that have the memory of an argument."""
        made = [self.makes[j] for j in self.in_place.values()]
        return [x for x in made if x.memory.argument is not None]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a function does with tensors of one combination of types.

    Attributes:
      steps: what happens, in order.
      given: for each result the argument that it is in the end; None for others.
      updated: positions of arguments whose memory is written.
    """

    arguments: list[Slot]
    steps: list[Step]
    results: list[Slot]
    given: list[int | None]
    updated: list[int]


def plan(
    closed: _jax.ClosedJaxpr, finals: Sequence[int], *, may_update: bool = True
) -> Plan:
    """Plans a traced function.

    Args:
      closed: the function, of flat arguments.
      finals: arguments that are updated: the last results are their new contents.
      may_update: whether launches may write arguments at all.

    Raises:
      UnsupportedError: an operation has no counterpart in torch.
    """
    region = region_of(closed)
    walk = _Walk()
    arguments = [
        Slot(x.shape, x.dtype, argument=i) for i, x in enumerate(region.inputs)
    ]
    found = walk.run(region, arguments)
    count = len(found) - len(finals)
    _share(walk.steps, found, may_update)
    steps = _needed(walk.steps, found)
    contents = dict(zip(finals, found[count:], strict=True))
    stored = {i: x for i, x in contents.items() if x.memory is not arguments[i]}
    written = {x.memory for step in steps for x in step.updates()}
    updated = {i for i, x in enumerate(arguments) if x in written}

    def kept(x: Slot) -> Slot:
        """A copy of what the end overwrites, or a caller may."""
        if x.constant is None and x.memory.argument not in stored:
            return x
        steps.append(Step(Operation(torch.clone), [x], [Slot(x.shape, x.dtype)]))
        return steps[-1].makes[0]

    results = [kept(x) for x in found[:count]]
    given = [_argument(x, updated) for x in results]
    for i, x in zip(stored, [kept(x) for x in stored.values()], strict=True):
        end = Slot(x.shape, x.dtype)
        steps.append(Step(Operation(torch.Tensor.copy_), [arguments[i], x], [end]))
    return Plan(arguments, steps, results, given, sorted(updated | stored.keys()))


def _argument(x: Slot, updated: set[Any]) -> int | None:
    """The argument that a result is, after an update too; None for others."""
    whole = x.memory if x.memory.argument in updated else x
    return whole.argument if whole.shape == x.shape else None


class _Walk:
    """Makes steps of the operations of a program."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def run(self, region: Region, inputs: Sequence[Slot]) -> list[Slot]:
        """Appends the steps of a region; returns the slots of its results."""
        # A reference is the slot of its present contents.
        names: dict[Operand, Slot] = dict(zip(region.inputs, inputs, strict=True))
        for op in region.ops:
            operands = [_slot_of(x, names) for x in op.inputs]
            results = self._results(op, operands, names)
            names.update(zip(op.results, results, strict=True))
        return [_slot_of(x, names) for x in region.results]

    def _results(
        self, op: Op, operands: list[Slot], names: dict[Operand, Slot]
    ) -> list[Slot]:
        if op.primitive is call.kernel_p:
            return self._launch(call.CallParams(**op.equation.params), operands)
        if (expanded := call.expansion(op.equation)) is not None:
            return self.run(region_of(expanded), operands)
        if op.name in ("new_ref", "ref", "freeze", "get", "swap"):
            return self._reference(op, operands, names)
        is_plain = all(type(x.aval) is _jax.ShapedArray for x in op.results)
        if is_plain and all(x.constant is not None for x in operands):
            return _evaluated(op, operands)
        does = operation_for(op, op.where)
        (result,) = (Slot(x.shape, x.dtype) for x in op.results)
        if does.is_view:
            result.memory = operands[0].memory
        self.steps.append(Step(does, operands, [result]))
        return [result]

    def _launch(self, params: call.CallParams, operands: list[Slot]) -> list[Slot]:
        results = [Slot(x.shape, x.dtype) for x in params.out_avals]
        in_place = dict(params.aliases)
        self.steps.append(Step(params, operands, results, in_place))
        return results

    def _reference(
        self, op: Op, operands: list[Slot], names: dict[Operand, Slot]
    ) -> list[Slot]:
        if op.name in ("get", "swap") and op.equation.params["tree"].num_nodes > 1:
            raise errors.UnsupportedError(
                "as_torch_kernel: a part of a jax.Ref is accessed outside of a kernel",
                expected="ref[...]",
                got=op.name,
                hint="pass the reference to a kernel and take the part there",
                where=op.where,
            )
        if op.name == "swap":
            names[op.inputs[0]] = operands[1]
        return [operands[0]] if op.results else []


def _slot_of(x: Operand, names: Mapping[Operand, Slot]) -> Slot:
    if isinstance(x, Constant):
        value = np.asarray(x.value)
        return Slot(value.shape, value.dtype, constant=value)
    return names[x]


def _evaluated(op: Op, operands: Sequence[Slot]) -> list[Slot]:
    with on_cpu(), jax.enable_x64(True):
        values = _jax.bind_again(op.equation, [x.constant for x in operands])
        arrays = [np.asarray(x) for x in values]
    return [Slot(x.shape, x.dtype, constant=x) for x in arrays]


def on_cpu() -> Any:
    """Returns a context in which JAX evaluates on the CPU."""
    return jax.default_device(jax.devices("cpu")[0])


def _share(steps: Sequence[Step], results: Sequence[Slot], may_update: bool) -> None:
    """Lets launches update operands in place, or copies these first."""
    last = {x: i for i, step in enumerate(steps) for x in step.reads}
    last.update(dict.fromkeys(results, len(steps)))
    for at, step in enumerate(steps):
        for i, j in step.in_place.items():
            memory = step.reads[i].memory
            is_read = any(last[x] > at for x in last if x.memory is memory)
            # The launch itself may read it a second time.
            is_read |= sum(x.memory is memory for x in step.reads) > 1
            is_fixed = memory.argument is not None and not may_update
            if is_read or is_fixed or memory.constant is not None:
                step.copied.add(i)
                continue
            new = step.makes[j]
            for x in [*last, new]:
                if x.memory is new:
                    x.memory = memory


def _needed(steps: Sequence[Step], results: Sequence[Slot]) -> list[Step]:
    """Drops steps whose results nobody reads, and which do nothing else."""
    read, kept = set(results), []
    for step in reversed(steps):
        effects = step.updates() or getattr(step.does, "is_observable", False)
        if effects or not read.isdisjoint(step.makes):
            kept.append(step)
            read.update(step.reads)
    return kept[::-1]
