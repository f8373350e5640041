# SPDX-License-Identifier: Apache-2.0
"""Scalars, loops, branches, and the threads that execute them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, nvvm, scf, vector

from pallas_gpu import errors
from pallas_gpu.emitters import mbarrier, module
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.elements import dtypes, scalars
from pallas_gpu.emitters.sync import delay
from pallas_gpu.mosaic import elements
from pallas_gpu.types.profiling.threads import ThreadSubset as ThreadSubset


def i32() -> ir.Type:
    """The type of indices of emitters."""
    return ir.IntegerType.get_signless(32)


def c(val: int | float, ty: ir.Type) -> ir.Value:
    """Returns a constant of a type: an integer, `index`, a float, or a vector."""
    if isinstance(ty, ir.VectorType):
        return vector.broadcast(ty, c(val, ty.element_type))
    if isinstance(ty, ir.FloatType):
        return arith.constant(ty, ir.FloatAttr.get(ty, float(val)))
    if not isinstance(val, int | np.integer):
        raise errors.ArgumentTypeError(
            "c: a constant of an integer type", expected="an integer", got=repr(val)
        )
    return arith.constant(ty, ir.IntegerAttr.get(ty, int(val)))


def as_i32(value: int | ir.Value) -> int | ir.Value:
    """An index as an int where it is known, else as an i32."""
    known = scalars.known(value)
    if known is not None:
        return known
    assert isinstance(value, ir.Value)
    if value.type == i32():
        return value
    if isinstance(value.type, ir.IndexType):
        owner = value.owner
        if not isinstance(owner, ir.Block) and owner.operation.name in (
            "arith.index_cast",
            "arith.index_castui",
        ):
            inner = owner.operation.operands[0]
            if inner.type == i32():
                return inner
        return arith.index_cast(i32(), value)
    if value.type.width < 32:
        return arith.extui(i32(), value)
    return arith.trunci(i32(), value)


def i32_value(value: int | ir.Value) -> ir.Value:
    """An index as an i32 value."""
    return module.current().i32(as_i32(value))


def barrier_index(offset: int | ir.Value, count: int) -> int | ir.Value:
    """The index of one of some barriers, as an int where it is known, else as an i32.

    Raises:
      OutOfBoundsError: there is no such barrier.
    """
    offset = as_i32(offset)
    if isinstance(offset, int) and not 0 <= offset < count:
        raise errors.OutOfBoundsError(
            "A barrier's index is out of bounds",
            expected=f"0 to {count - 1}",
            got=offset,
        )
    return offset


@dataclasses.dataclass(frozen=True)
class DynamicSlice:
    """A range of an axis: `length` elements from `base`: an int, `index` or i32."""

    base: ir.Value | int
    length: int

    def __post_init__(self) -> None:
        for name, value in (("base", self.base), ("length", self.length)):
            if isinstance(value, int) and value < 0:
                raise errors.ArgumentError(
                    f"DynamicSlice: {name} is negative", expected="0 or more", got=value
                )


ds = DynamicSlice


# --- loops and branches ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ForResult:
    """A loop that `fori` has made: `op`, and what it carries at its end, `results`."""

    op: scf.ForOp
    results: Any

    @property
    def result(self) -> Any:
        """The one value that the loop carries."""
        if len(self.results) != 1:
            raise errors.ArgumentError(
                "The loop does not carry one value",
                expected="`results` of a loop that carries several",
                got=f"{len(self.results)} values",
            )
        return self.results[0]


def fori(bound: ir.Value, carrys: Any) -> Callable[[Callable], ForResult]:
    """Returns a decorator that makes a loop of its body `f(i, carrys) -> carrys`.

    The decorated name becomes a `ForResult`. `bound` and `i` are integers or of type
    `index`; `carrys` is a value, or a list or tuple of trees of values.

    Raises:
      ArgumentError: the body returns another tree than it gets.
    """
    single = not isinstance(carrys, list | tuple)
    leaves, tree = jax.tree.flatten([carrys] if single else carrys)

    def loop(f: Callable) -> ForResult:
        zero, one = c(0, bound.type), c(1, bound.type)
        op = scf.ForOp(zero, bound, one, leaves)
        with ir.InsertionPoint(op.body):
            inner = jax.tree.unflatten(tree, op.inner_iter_args)
            new = f(op.induction_variable, inner[0] if single else inner)
            new_leaves, new_tree = jax.tree.flatten([new] if single else new)
            if new_tree != tree:
                raise errors.ArgumentError(
                    "fori: the body returns something else than the loop carries",
                    expected=tree,
                    got=new_tree,
                )
            scf.yield_(new_leaves)
        return ForResult(op, jax.tree.unflatten(tree, list(op.results)))

    return loop


@contextlib.contextmanager
def when(cond: ir.Value) -> Iterator[None]:
    """A context whose code executes only where `cond`, an i1, holds."""
    with predicated(cond):
        yield


# --- threads --------------------------------------------------------------------------


def thread_idx() -> ir.Value:
    """Returns the index of the thread in its block, i32."""
    return _in_block("warpgroup_thread", module.WARPGROUP_THREADS)


def _in_block(name: str, count: int) -> ir.Value:
    """The index in the block of what has an index in its warpgroup of `count`."""
    kernel = module.current()

    def emit() -> ir.Value:
        first = arith.muli(kernel.threads.warpgroup, kernel.i32(count))
        return arith.addi(first, getattr(kernel.threads, name))

    return kernel.hoisted(f"{name} in block", emit)


def warp_idx(sync: bool = True) -> ir.Value:
    """Returns the index of the warp in its block, i32.

    It is warp-uniform in any case; `sync` is accepted for upstream's sake.
    """
    return _in_block("warp", 4)


def warpgroup_idx(sync: bool = True) -> ir.Value:
    """Returns the index of the warpgroup in its block, i32; `sync` as of `warp_idx`."""
    return module.current().threads.warpgroup


def single_thread_predicate(scope: ThreadSubset = ThreadSubset.BLOCK) -> ir.Value:
    """Returns an i1 that is true in one thread of each warp or warpgroup, or block."""
    threads = module.current().threads
    match scope:
        case ThreadSubset.WARP:
            return threads.warp_elected
        case ThreadSubset.WARPGROUP:
            return threads.elected
        case _:
            return mbarrier.block_leader()


# The scope of the innermost `single_thread` that is open.
_SINGLE: list[ThreadSubset] = []


@contextlib.contextmanager
def single_thread(scope: ThreadSubset = ThreadSubset.BLOCK) -> Iterator[None]:
    """A context whose code one thread of `scope` executes; nested ones do nothing."""
    if _SINGLE and _SINGLE[-1] >= scope:
        yield
        return
    _SINGLE.append(scope)
    try:
        with predicated(single_thread_predicate(scope)):
            yield
    finally:
        _SINGLE.pop()


def warpgroup_barrier() -> None:
    """Waits until all threads of the warpgroup have arrived."""
    mbarrier.warpgroup_barrier()


def commit_shared() -> None:
    """Makes the warpgroup's stores to SMEM visible to asynchronous copies and products.

    PTX: `fence.proxy.async.shared::cta`, then a barrier of the warpgroup: all of its
    threads issue it.
    """
    shared = nvvm.SharedSpace.shared_cta
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=shared)
    mbarrier.synchronize()


def nanosleep(nanos: ir.Value) -> None:
    """Waits for about as many nanoseconds, an i32. PTX: `nanosleep.u32`."""
    delay.delay(nanos)


# --- integers -------------------------------------------------------------------------


def is_known_divisible(value: ir.Value, divisor: int, max_depth: int = 10) -> bool:
    """Returns whether an integer is known to be a multiple of `divisor`.

    All operations are looked through; `max_depth` is accepted for upstream's sake.
    """
    return scalars.divisor(value) % divisor == 0


def tile_shape(shape: Sequence[int], tiling: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of an array whose trailing dimensions are tiled.

      >>> tile_shape((4, 64, 128), (8, 64))
      (4, 8, 2, 8, 64)

    Raises:
      ShapeError: the tiling does not divide the shape.
    """
    lead = len(shape) - len(tiling)
    pairs = list(zip(shape[lead:], tiling, strict=False))
    if lead < 0 or any(size % tile for size, tile in pairs):
        raise errors.ShapeError(
            "The tiling does not divide the shape",
            expected=f"trailing dimensions that are multiples of {tuple(tiling)}",
            got=tuple(shape),
        )
    counts = tuple(size // tile for size, tile in pairs)
    return (*shape[:lead], *counts, *tiling)


# --- printing -------------------------------------------------------------------------


def debug_print(
    fmt: str,
    *args: ir.Value,
    uniform: bool = True,
    scope: ThreadSubset | None = None,
) -> None:
    """Prints a line: each `{}` in the format stands for a scalar or a vector.

    Integers are printed without a sign, vectors as lists. With `uniform` one thread of
    `scope`, by default the warpgroup, prints; else each one that executes it.
    """
    if not uniform and scope is not None:
        raise errors.ArgumentError(
            "debug_print: a scope is for a line that one thread prints",
            expected="uniform=True, or no scope",
            got=f"scope={scope!r}",
        )
    formats, values = [], []
    for arg in args:
        many = isinstance(arg.type, ir.VectorType)
        found = [_printed(x) for x in (dtypes.elements(arg) if many else [arg])]
        text = ",".join(text for text, _ in found)
        formats.append(f"[{text}]" if many else text)
        values += [value for _, value in found]
    chosen = ThreadSubset.WARPGROUP if scope is None else scope
    with single_thread(chosen) if uniform else contextlib.nullcontext():
        gpu.printf(fmt.format(*formats) + "\n", *values)


def _printed(value: ir.Value) -> tuple[str, ir.Value]:
    """The conversion of a value, and what it takes."""
    if isinstance(value.type, ir.IndexType):
        return "%llu", arith.index_castui(ir.IntegerType.get_signless(64), value)
    dtype = elements.dtype_of(value.type, is_signed=False)
    if isinstance(value.type, ir.IntegerType):
        return "%llu", scalars.convert(value, dtype, dtypes.U64)
    return "%f", scalars.convert(value, dtype, dtypes.F64)
