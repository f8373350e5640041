# SPDX-License-Identifier: Apache-2.0
"""The work of a kernel: what one CTA computes and copies, counted in its program.

The scalars of a body (positions, bounds of loops, conditions) are evaluated for a CTA,
arrays are not. A loop that runs for a known number of steps counts as often; a branch
on an unknown condition counts as the most expensive of its branches.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_gpu import _jax, types
from pallas_gpu.program.build import region_of
from pallas_gpu.program.flow import Flow
from pallas_gpu.program.nodes import Access, Constant, Kind, Op, Operand, Region, Value

# Of longer loops these steps are followed; one without a known end counts as a step.
_MOST_STEPS = 4096
# The instruction of a warpgroup reads 64 rows of A (PTX ISA, wgmma.mma_async).
_WGMMA_ROWS = 64
# A wgmma of few columns takes as long as one of these. Estimate.
_LEAST_MMA_COLUMNS = 32
# CUDA C++ Programming Guide, "Shared Memory": 32 banks of 4 bytes.
SMEM_BYTES_PER_CYCLE = 128
# Instructions per element of functions that are not one instruction. Estimate.
_EXPENSIVE = {
    "exp": 3, "exp2": 2, "log": 4, "tanh": 4, "logistic": 6, "erf": 12, "sin": 12,
    "cos": 12, "pow": 10, "div": 8, "sqrt": 4, "rsqrt": 2, "integer_pow": 2,
}  # fmt: skip
_NO_WORK = {"broadcast_in_dim", "reshape", "slice", "squeeze", "iota", "stop_gradient"}


@dataclasses.dataclass
class Work:
    """What a warpgroup does; the sum over those of a CTA is the CTA's.

    Attributes:
      tensor_flops: of the tensor core, by the bits of the operands' elements.
      fills: bytes copied to each SMEM array, by allocation.
      executed: how often operations are executed, where they are counted.
      tensor_cycles: of the tensor core at its full rate, SMEM reads included.
      loaded_bytes: copied or loaded from GMEM; a share of what is multicast.
      filled_bytes: copied from GMEM to this CTA's SMEM.
      stored_bytes: copied or stored to GMEM.
      smem_bytes: loaded and stored by threads.
      elements: elementwise instructions of all threads, in elements.
      waits: waits for barriers.
    """

    tensor_flops: dict[int, float] = dataclasses.field(default_factory=dict)
    fills: dict[int, float] = dataclasses.field(default_factory=dict)
    executed: dict[Op, float] = dataclasses.field(default_factory=dict)
    tensor_cycles: float = 0.0
    loaded_bytes: float = 0.0
    filled_bytes: float = 0.0
    stored_bytes: float = 0.0
    smem_bytes: float = 0.0
    elements: float = 0.0
    waits: float = 0.0

    def add(self, other: Work, times: float = 1.0) -> None:
        """Adds other work, several times."""
        pairs: list[tuple[dict[Any, float], dict[Any, float]]] = [
            (self.tensor_flops, other.tensor_flops),
            (self.fills, other.fills),
            (self.executed, other.executed),
        ]
        for mine, more_of in pairs:
            for key, value in more_of.items():
                mine[key] = mine.get(key, 0) + times * value
        for name in _NUMBERS:
            more = times * getattr(other, name)
            setattr(self, name, getattr(self, name) + more)

    @property
    def size(self) -> float:
        """A rough measure, to compare branches."""
        numbers = sum(getattr(self, name) for name in _NUMBERS)
        return numbers + sum(self.tensor_flops.values())


_NUMBERS = [f.name for f in dataclasses.fields(Work) if f.type == "float"]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in SMEM to which something is copied.

    Attributes:
      num_bytes: its size.
      copy_bytes: of the largest copy.
      barrier: the allocation of the barriers that complete the copies.
      is_shared: whether several CTAs get the copies.
    """

    num_bytes: float
    copy_bytes: float
    barrier: int | None
    is_shared: bool


@dataclasses.dataclass(frozen=True)
class Memory:
    """A reference in the body: an allocation, whatever it is called.

    Attributes:
      number: differs between allocations.
      num_bytes: its size.
    """

    number: int
    num_bytes: float


# What is known of the inputs of a loop's step, and the conditions of its branches.
_Step = tuple[Sequence[Any], tuple[Any, ...]]


class Counter(Flow[Any]):
    """Counts the work of one warpgroup at a position of the launch.

    What is known of a value is a number, a `Memory`, or None.

    Attributes:
      buffers: the SMEM arrays to which something is copied, by allocation.
      registers: of each thread, if the warpgroup sets them.
    """

    def __init__(self, positions: Mapping[Any, int], sizes: Mapping[Any, int]):
        super().__init__()
        self._positions, self._sizes = positions, sizes
        self._allocations = 0
        self._work = Work()
        self.buffers: dict[int, Buffer] = {}
        self.registers: int | None = None

    def count(self, jaxpr: _jax.Jaxpr) -> Work:
        """Returns the work of a kernel's body."""
        region = region_of(jaxpr)
        return self._counted(region, [self.unknown(x) for x in region.inputs])[0]

    def _counted(self, region: Region, inputs: Sequence[Any]) -> tuple[Work, list[Any]]:
        """Returns the work of a region and its results, as far as they are known."""
        outer, self._work = self._work, Work()
        results = self.run(region, inputs)
        work, self._work = self._work, outer
        return work, results

    def of(self, operand: Operand) -> Any:
        """Returns what is known of an operand; arrays may not have been followed."""
        if isinstance(operand, Constant):
            return self.constant(operand)
        return self.facts.get(operand)

    def unknown(self, value: Value) -> Memory | None:
        if not isinstance(value.aval, _jax.AbstractRef):
            return None
        self._allocations += 1
        return Memory(self._allocations, _bytes(value))

    def constant(self, constant: Constant) -> Any:
        return None if constant.shape else constant.value.item()

    def results(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        if op.name == "axis_index":
            return [self._positions.get(op.params["axis_name"])]
        if op.name in _SCALARS and op.results[0].shape == ():
            return [_evaluated(op.name, operands)]
        self._count(op)
        return [None] * len(op.results)

    # --- regions ----------------------------------------------------------------------

    def _follow(self, op: Op, operands: Sequence[Any]) -> Sequence[Any]:
        match op.kind:
            case Kind.IF:
                return self._branch(op, operands[0])
            case Kind.FOR:
                return self._for(op)
            case Kind.WHILE:
                return self._while(op)
        return super()._follow(op, operands)

    def _branch(self, op: Op, index: Any) -> Sequence[Any]:
        if index is not None:
            taken = min(max(int(index), 0), len(op.regions) - 1)
            return self.run(op.regions[taken], self._inputs(op, taken))
        counted = [
            self._counted(region, self._inputs(op, i))[0]
            for i, region in enumerate(op.regions)
        ]
        self._work.add(max(counted, key=lambda work: work.size))
        return [None] * len(op.results)

    def _while(self, op: Op) -> Sequence[Any]:
        condition, body = op.regions
        n = len(op.carries)
        of_condition, of_body = (self._inputs(op, i) for i in range(2))
        first, consts = of_body[len(of_body) - n :], of_body[: len(of_body) - n]
        kept = of_condition[: len(of_condition) - n]
        needed = _needed(body)
        steps: list[_Step] = []
        carry: Sequence[Any] = first
        while len(steps) <= _MOST_STEPS:
            _, (goes_on,) = self._counted(condition, [*kept, *carry])
            if goes_on is None:
                break
            if not goes_on:
                self._add_steps(body, steps)
                return carry
            _, results = self._counted(needed, [*consts, *carry])
            steps.append(([*consts, *carry], tuple(results[n:])))
            carry = results[:n]
        self._work.add(self._counted(body, [*consts, *first])[0])
        return [None] * len(op.results)

    def _for(self, op: Op) -> Sequence[Any]:
        (body,), length = op.regions, op.params["length"]
        inputs, needed = self._inputs(op, 0), _needed(body)
        steps: list[_Step] = []
        for _ in range(min(length, _MOST_STEPS)):
            _, results = self._counted(needed, inputs)
            steps.append((inputs, tuple(results[len(body.results) :])))
            inputs = list(inputs)
            for i, j in op.carries:
                inputs[i] = results[j]
        self._add_steps(body, steps, length)
        carried = [inputs[i] if length <= _MOST_STEPS else None for i, _ in op.carries]
        return [*carried, *[None] * (len(op.results) - len(op.carries))]

    def _add_steps(
        self,
        body: Region,
        steps: Sequence[_Step],
        number: int | None = None,
    ) -> None:
        """Adds the work of a loop's steps.

        One step is counted for all that take the same branches, that in their middle.

        Args:
          steps: inputs, and conditions of the branches.
          number: of all steps, if there are more.
        """
        alike: dict[tuple[Any, ...], list[Sequence[Any]]] = {}
        for inputs, conditions in steps:
            alike.setdefault(conditions, []).append(inputs)
        for group in alike.values():
            work, _ = self._counted(body, group[len(group) // 2])
            share = 1.0 if number is None else number / len(steps)
            self._work.add(work, len(group) * share)

    # --- what costs something ---------------------------------------------------------

    def _count(self, op: Op) -> None:
        accesses = op.accesses
        spaces: dict[Any, Access] = {access.space: access for access in accesses}
        if op.name in PRODUCTS:
            self._work.add(of_product(op))
        elif op.name == "barrier_wait":
            self._work.waits += 1
        elif op.name == "set_max_registers":
            self.registers = max(self.registers or 0, int(op.params["n"]))
        elif types.GMEM in spaces and types.SMEM in spaces:
            if spaces[types.SMEM].writes:
                self._copy_in(op, spaces[types.SMEM], spaces.get(types.BARRIERS))
            else:
                self._work.stored_bytes += _bytes(spaces[types.SMEM])
        elif accesses:
            if "generic" in accesses[0].operation.proxies:
                self._access(op, accesses[0])
        else:
            self._work.elements += _elements(op)

    def _copy_in(self, op: Op, dst: Access, barrier: Access | None) -> None:
        num_bytes = _bytes(dst)
        axes = op.params.get("collective_axes") or ()
        sharing = math.prod(self._sizes.get(axis, 1) for axis in axes)
        self._work.loaded_bytes += num_bytes / sharing
        self._work.filled_bytes += num_bytes
        memory = self.of(dst.buffer)
        if not isinstance(memory, Memory):
            return
        known = self.buffers.get(memory.number)
        completes = None if barrier is None else self.of(barrier.buffer)
        self.buffers[memory.number] = Buffer(
            memory.num_bytes,
            max(num_bytes, known.copy_bytes if known else 0.0),
            completes.number if isinstance(completes, Memory) else None,
            sharing > 1,
        )
        fills = self._work.fills
        fills[memory.number] = fills.get(memory.number, 0) + num_bytes

    def _access(self, op: Op, access: Access) -> None:
        values = [x for x in (*op.results, *op.inputs) if not _is_ref(x)]
        num_bytes = max(map(_bytes, values), default=0.0)
        match access.space, access.writes:
            case types.SMEM, _:
                self._work.smem_bytes += num_bytes
            case types.GMEM, True:
                self._work.stored_bytes += num_bytes
            case types.GMEM, False:
                self._work.loaded_bytes += num_bytes


PRODUCTS = ("wgmma", "mma", "tcgen05_mma")


def of_product(op: Op) -> Work:
    """Returns the work of a product on the tensor core."""
    a, result = op.operands["a"], op.operands.get("acc") or op.results[0]
    m, n = _shape(result)[-2:]
    k = math.prod(_shape(a)) / m
    bits = types.itemsize_bits(a.dtype)
    tiles = -(-m // _WGMMA_ROWS)
    in_smem = isinstance(a, Access)
    read = tiles * k * bits / 8 * (n + (_WGMMA_ROWS if in_smem else 0))
    macs = tiles * _WGMMA_ROWS * max(n, _LEAST_MMA_COLUMNS) * k
    cycles = max(macs / macs_per_cycle(bits), read / SMEM_BYTES_PER_CYCLE)
    return Work(tensor_flops={bits: 2.0 * m * n * k}, tensor_cycles=cycles)


def macs_per_cycle(bits: int) -> float:
    """Returns the multiplications of an SM's tensor cores per cycle, dense.

    NVIDIA's data sheet of the H100 SXM: 989 TFLOP/s of 16-bit floats on 132 SMs at
    1.83 GHz; twice as many for 8 bits, half as many for tf32.
    """
    return 2048.0 * 16 / max(bits, 8)


def _needed(region: Region) -> Region:
    """Returns what computes the scalar results of a region.

    Its results are followed by the conditions of branches.
    """
    conditions = [op.inputs[0] for op in region.ops if op.kind is Kind.IF]
    wanted = {x for x in region.results if x.shape == ()} | set(conditions)
    found = []
    for op in reversed(region.ops):
        if wanted.intersection(op.results):
            found.append(op)
            wanted.update(op.inputs)
    results = (*region.results, *conditions)
    return dataclasses.replace(region, ops=tuple(found[::-1]), results=results)


# --- values ---------------------------------------------------------------------------


def _truncated(a: Any, b: Any) -> Any:
    return None if b == 0 else math.trunc(a / b) if a * b < 0 else a // b


def _remainder(a: Any, b: Any) -> Any:
    return None if b == 0 else a - b * _truncated(a, b)


_SCALARS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "div": _truncated, "rem": _remainder, "max": max, "min": min,
    "neg": operator.neg, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "not": lambda x: not x,
    "sign": lambda x: (x > 0) - (x < 0),
    "shift_left": operator.lshift, "shift_right_arithmetic": operator.rshift,
    "shift_right_logical": operator.rshift,
    "select_n": lambda which, *cases: cases[int(which)],
    "clamp": lambda low, x, high: min(max(x, low), high),
    "convert_element_type": lambda x: x, "broadcast_in_dim": lambda x, *_: x,
    "reshape": lambda x, *_: x, "squeeze": lambda x: x, "copy": lambda x: x,
    "multiple_of": lambda x: x,
}  # fmt: skip


def _evaluated(name: str, inputs: Sequence[Any]) -> Any:
    if name == "select_n" and inputs[0] is not None:
        return inputs[1 + int(inputs[0])]
    if not all(_is_number(x) for x in inputs):
        return None
    if name == "not" and not isinstance(inputs[0], bool):
        return ~inputs[0]
    try:
        return _SCALARS[name](*inputs)
    except (ArithmeticError, IndexError, TypeError, ValueError):
        return None


def _is_number(x: Any) -> bool:
    return isinstance(x, (bool, int, float))


def _elements(op: Op) -> float:
    """Returns the instructions of an operation on arrays, in elements."""
    operands = (*op.inputs, *op.results)
    size = max((math.prod(x.shape) for x in operands if x.shape), default=0)
    if size <= 1 or op.name in _NO_WORK or any(map(_is_ref, op.inputs)):
        return 0.0
    return float(size) * _EXPENSIVE.get(op.name, 1)


def _is_ref(x: Any) -> bool:
    return isinstance(getattr(x, "aval", None), _jax.AbstractRef)


def _shape(x: Any) -> tuple[int, ...]:
    return x.window.shape if isinstance(x, Access) else x.shape


def _bytes(x: Any) -> float:
    if _is_ref(x) and x.aval.memory_space not in (types.SMEM, types.GMEM):
        return 0.0  # barriers and accumulators
    return math.prod(_shape(x)) * types.itemsize_bits(x.dtype) / 8
