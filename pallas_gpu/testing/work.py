# SPDX-License-Identifier: Apache-2.0
"""The work of a kernel: what one CTA computes and copies, counted in its jaxpr.

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

import jax.numpy as jnp

from pallas_gpu import _jax, types, walk
from pallas_gpu.primitives import _operands as operands

# Longer loops, and loops without a known end, are counted by one step of theirs.
_MOST_STEPS = 4096
_STEPS_ONE_BY_ONE = 4
# Of other loops the work of some steps is counted: that of the others is like theirs.
_SAMPLED_STEPS = 3
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
_ENDS_OF_COPY = "dst", "barrier"
_NO_WORK = {"broadcast_in_dim", "reshape", "slice", "squeeze", "iota", "stop_gradient"}


@dataclasses.dataclass
class Work:
    """What a warpgroup does; the sum over those of a CTA is the CTA's.

    Attributes:
      tensor_flops: of the tensor core, by the bits of the operands' elements.
      fills: bytes copied to each SMEM array, by allocation.
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
    tensor_cycles: float = 0.0
    loaded_bytes: float = 0.0
    filled_bytes: float = 0.0
    stored_bytes: float = 0.0
    smem_bytes: float = 0.0
    elements: float = 0.0
    waits: float = 0.0

    def add(self, other: Work, times: float = 1.0) -> None:
        """Adds other work, several times."""
        for mine, more_of in (
            (self.tensor_flops, other.tensor_flops),
            (self.fills, other.fills),
        ):
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


class Counter:
    """Counts the work of one warpgroup at a position of the launch.

    Attributes:
      buffers: the SMEM arrays to which something is copied, by allocation.
      registers: of each thread, if the warpgroup sets them.
    """

    def __init__(self, positions: Mapping[Any, int], sizes: Mapping[Any, int]):
        self._positions, self._sizes = positions, sizes
        self._allocations = 0
        self.buffers: dict[int, Buffer] = {}
        self.registers: int | None = None

    def count(
        self,
        jaxpr: _jax.Jaxpr,
        inputs: Sequence[Any],
        eqns: Sequence[Any] | None = None,
    ) -> tuple[Work, list[Any]]:
        """Returns the work of a jaxpr and its results, as far as they are known.

        Args:
          jaxpr: the jaxpr.
          inputs: for each input a number, a `Memory`, or None if it is unknown.
          eqns: the equations to count; default: all.
        """
        known: dict[Any, Any] = {}
        for var, value in zip(jaxpr.invars, inputs, strict=True):
            known[var] = self._memory(var.aval) if value is None else value
        work = Work()

        def read(atom: Any) -> Any:
            if isinstance(atom, _jax.Literal):
                return _plain(atom.val)
            return known.get(atom)

        for eqn in jaxpr.eqns if eqns is None else eqns:
            more, results = self._equation(eqn, [read(x) for x in eqn.invars])
            if more is not None:
                work.add(more)
            for var, value in zip(eqn.outvars, results, strict=True):
                known[var] = value
        return work, [read(x) for x in jaxpr.outvars]

    def _memory(self, aval: Any) -> Memory | None:
        if not isinstance(aval, _jax.AbstractRef):
            return None
        self._allocations += 1
        return Memory(self._allocations, _bytes(aval))

    def _equation(self, eqn: Any, inputs: list[Any]) -> tuple[Work | None, list[Any]]:
        # No work for what costs nothing: most equations are scalar arithmetic.
        name = eqn.primitive.name
        unknown = [None] * len(eqn.outvars)
        if name == "axis_index":
            return None, [self._positions.get(eqn.params["axis_name"])]
        if name == "cond":
            return self._branch(eqn, inputs)
        if name == "while":
            return self._while(eqn, inputs)
        if name == "scan":
            return self._scan(eqn, inputs)
        if bodies := walk.bodies(eqn):
            return self._inline(eqn, bodies, inputs)
        if name in _SCALARS and _is_scalar(eqn):
            return None, [_evaluated(eqn, inputs)]
        if (counted := _COUNTED.get(name)) is not None:
            return counted(self, eqn, inputs), unknown
        return _elementwise(eqn), unknown

    def _inline(
        self, eqn: Any, bodies: Sequence[walk.Body], inputs: list[Any]
    ) -> tuple[Work, list[Any]]:
        # A jaxpr that the equation calls: jit, run_scoped, warp_map, custom_jvp.
        inner = bodies[0].jaxpr
        given = [*inputs, *[None] * len(inner.invars)][: len(inner.invars)]
        work, results = self.count(inner, given)
        if len(results) != len(eqn.outvars):
            results = [None] * len(eqn.outvars)
        return work, results

    def _branch(self, eqn: Any, inputs: list[Any]) -> tuple[Work, list[Any]]:
        index, *rest = inputs
        jaxprs = [body.jaxpr for body in walk.bodies(eqn)]
        if index is not None:
            return self.count(jaxprs[min(max(int(index), 0), len(jaxprs) - 1)], rest)
        counted = [self.count(jaxpr, rest) for jaxpr in jaxprs]
        work = max((work for work, _ in counted), key=lambda w: w.size)
        return work, [None] * len(eqn.outvars)

    def _while(self, eqn: Any, inputs: list[Any]) -> tuple[Work, list[Any]]:
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond_consts, body_consts = inputs[:n_cond], inputs[n_cond : n_cond + n_body]
        carry = inputs[n_cond + n_body :]
        cond, body = (b.jaxpr for b in walk.bodies(eqn))
        # First the carries of all steps, then the work of some of them.
        carries = [carry]
        needed = _needed(body)
        while len(carries) <= _MOST_STEPS:
            _, (goes_on,) = self.count(cond, [*cond_consts, *carries[-1]])
            if goes_on is None:
                work, _ = self.count(body, [*body_consts, *carries[0]])
                return work, [None] * len(eqn.outvars)
            if not goes_on:
                break
            _, following = self.count(body, [*body_consts, *carries[-1]], needed)
            carries.append(following)
        *starts, last = carries
        total, sampled = Work(), _sampled(starts)
        for start in sampled:
            work, _ = self.count(body, [*body_consts, *start])
            total.add(work, len(starts) / len(sampled))
        return total, last

    def _scan(self, eqn: Any, inputs: list[Any]) -> tuple[Work, list[Any]]:
        n_consts, n_carry = _jax.scan_arity(eqn.params)
        consts, carry = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]
        (body,) = (b.jaxpr for b in walk.bodies(eqn))
        length = eqn.params["length"]
        rest = [None] * (len(body.invars) - n_consts - n_carry)
        total = Work()
        one_by_one = length if length <= _STEPS_ONE_BY_ONE else 1
        for _ in range(one_by_one):
            work, results = self.count(body, [*consts, *carry, *rest])
            total.add(work)
            carry = results[:n_carry]
        if length > one_by_one:
            middle = [None if _is_number(x) else x for x in carry]
            work, results = self.count(body, [*consts, *middle, *rest])
            total.add(work, length - one_by_one)
            carry = results[:n_carry]
        return total, [*carry, *[None] * (len(eqn.outvars) - n_carry)]

    # --- what costs something ---------------------------------------------------------

    def _copy_in(self, eqn: Any, inputs: list[Any]) -> Work:
        taken = _operands(eqn)
        num_bytes = _bytes(_type(taken["dst"]))
        axes = eqn.params.get("collective_axes") or ()
        axes = (axes,) if isinstance(axes, str) else axes
        sharing = math.prod(self._sizes.get(axis, 1) for axis in axes)
        given = operands.unflatten(eqn.params["tree"], inputs)
        memory, barrier = (getattr(given.get(n), "ref", None) for n in _ENDS_OF_COPY)
        work = Work(loaded_bytes=num_bytes / sharing, filled_bytes=num_bytes)
        if isinstance(memory, Memory):
            known = self.buffers.get(memory.number)
            largest = max(num_bytes, known.copy_bytes if known else 0.0)
            number = barrier.number if isinstance(barrier, Memory) else None
            self.buffers[memory.number] = Buffer(
                memory.num_bytes, largest, number, sharing > 1
            )
            work.fills[memory.number] = num_bytes
        return work

    def _copy_out(self, eqn: Any, _: list[Any]) -> Work:
        return Work(stored_bytes=_bytes(_type(_operands(eqn)["src"])))

    def _mma(self, eqn: Any, _: list[Any]) -> Work:
        taken = _operands(eqn)
        a, acc = _type(taken["a"]), taken.get("acc")
        result = eqn.outvars[0].aval if acc is None else _type(acc)
        m, n = result.shape[-2:]
        k = math.prod(a.shape) / m
        bits = _bits(a.dtype)
        tiles = -(-m // _WGMMA_ROWS)
        is_in_smem = isinstance(taken["a"], operands.RefOperand)
        read = tiles * k * bits / 8 * (n + (_WGMMA_ROWS if is_in_smem else 0))
        macs = tiles * _WGMMA_ROWS * max(n, _LEAST_MMA_COLUMNS) * k
        cycles = max(macs / macs_per_cycle(bits), read / SMEM_BYTES_PER_CYCLE)
        return Work(tensor_flops={bits: 2.0 * m * n * k}, tensor_cycles=cycles)

    def _wait(self, *_: Any) -> Work:
        return Work(waits=1)

    def _set_registers(self, eqn: Any, _: list[Any]) -> Work:
        self.registers = max(self.registers or 0, int(eqn.params["n"]))
        return Work()

    def _access(self, eqn: Any, _: list[Any]) -> Work:
        # JAX's get, swap and addupdate.
        ref = eqn.invars[0].aval
        values = [x.aval for x in (*eqn.outvars, *eqn.invars[1:2])]
        sizes = [
            _bytes(x) for x in values if hasattr(x, "shape") and hasattr(x, "dtype")
        ]
        num_bytes = max(sizes, default=0.0)
        return self._of_space(ref, num_bytes, is_store=eqn.primitive.name != "get")

    def _indexed(self, eqn: Any, _: list[Any]) -> Work:
        taken = _operands(eqn)
        target = next(x for x in taken.values() if isinstance(x, operands.RefOperand))
        values = [x.aval for x in (*eqn.outvars, *eqn.invars[1:])]
        sizes = [_bytes(x) for x in values if not isinstance(x, _jax.AbstractRef)]
        is_store = not eqn.outvars
        return self._of_space(target.ref, max(sizes, default=0.0), is_store=is_store)

    def _of_space(self, ref: Any, num_bytes: float, *, is_store: bool) -> Work:
        space = getattr(ref, "memory_space", None)
        if space is types.SMEM:
            return Work(smem_bytes=num_bytes)
        if space is types.GMEM:
            if is_store:
                return Work(stored_bytes=num_bytes)
            return Work(loaded_bytes=num_bytes)
        return Work()


_COUNTED: dict[str, Callable[[Counter, Any, list[Any]], Work]] = {
    **dict.fromkeys(
        ("copy_gmem_to_smem", "cp_async", "gather_rows", "copy_im2col"),
        Counter._copy_in,
    ),
    **dict.fromkeys(
        ("copy_smem_to_gmem", "copy_smem_to_gmem_by_threads", "scatter_rows"),
        Counter._copy_out,
    ),
    **dict.fromkeys(("wgmma", "mma", "tcgen05_mma"), Counter._mma),
    "barrier_wait": Counter._wait,
    "set_max_registers": Counter._set_registers,
    **dict.fromkeys(("get", "swap", "addupdate"), Counter._access),
    **dict.fromkeys(
        ("load", "store", "load_indexed", "store_indexed"), Counter._indexed
    ),
}


def macs_per_cycle(bits: int) -> float:
    """Returns the multiplications of an SM's tensor cores per cycle, dense.

    NVIDIA's data sheet of the H100 SXM: 989 TFLOP/s of 16-bit floats on 132 SMs at
    1.83 GHz; twice as many for 8 bits, half as many for tf32.
    """
    return 2048.0 * 16 / max(bits, 8)


def _needed(jaxpr: _jax.Jaxpr) -> list[Any]:
    """Returns the equations on which the results of a jaxpr depend that are scalars."""
    wanted = {
        x
        for x in jaxpr.outvars
        if not isinstance(x, _jax.Literal) and getattr(x.aval, "shape", None) == ()
    }
    found = []
    for eqn in reversed(jaxpr.eqns):
        if wanted.intersection(eqn.outvars):
            found.append(eqn)
            wanted |= {x for x in eqn.invars if not isinstance(x, _jax.Literal)}
    return found[::-1]


def _sampled(steps: Sequence[Any]) -> list[Any]:
    """Returns some of the steps, the first, the middle and the last included."""
    if len(steps) <= _SAMPLED_STEPS:
        return list(steps)
    last = len(steps) - 1
    return [
        steps[round(i * last / (_SAMPLED_STEPS - 1))] for i in range(_SAMPLED_STEPS)
    ]


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


def _is_scalar(eqn: Any) -> bool:
    (result,) = eqn.outvars
    return getattr(result.aval, "shape", None) == ()


def _evaluated(eqn: Any, inputs: Sequence[Any]) -> Any:
    if eqn.primitive.name == "select_n" and inputs[0] is not None:
        return inputs[1 + int(inputs[0])]
    if not all(_is_number(x) for x in inputs):
        return None
    if eqn.primitive.name == "not" and not isinstance(inputs[0], bool):
        return ~inputs[0]
    try:
        return _SCALARS[eqn.primitive.name](*inputs)
    except (ArithmeticError, IndexError, TypeError, ValueError):
        return None


def _is_number(x: Any) -> bool:
    return isinstance(x, bool | int | float)


def _plain(value: Any) -> Any:
    try:
        return value.item() if getattr(value, "shape", ()) == () else None
    except AttributeError:
        return value if _is_number(value) else None


def _elementwise(eqn: Any) -> Work:
    name = eqn.primitive.name
    shapes = [getattr(x.aval, "shape", ()) for x in (*eqn.invars, *eqn.outvars)]
    size = max((math.prod(shape) for shape in shapes if shape), default=0)
    refs = any(isinstance(x.aval, _jax.AbstractRef) for x in eqn.invars)
    if refs or size <= 1 or name in _NO_WORK:
        return Work()
    return Work(elements=float(size) * _EXPENSIVE.get(name, 1))


def _operands(eqn: Any) -> Any:
    return operands.unflatten(eqn.params["tree"], [x.aval for x in eqn.invars])


def _type(x: Any) -> Any:
    return x.array_type() if isinstance(x, operands.RefOperand) else x


def _bits(dtype: Any) -> int:
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return int(jnp.finfo(dtype).bits)
    return 8 if dtype == jnp.bool_ else int(jnp.iinfo(dtype).bits)


def _bytes(aval: Any) -> float:
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0.0
    try:
        return math.prod(shape) * _bits(dtype) / 8
    except (TypeError, ValueError):
        return 0.0  # barriers and semaphores
