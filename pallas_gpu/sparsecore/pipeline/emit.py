# SPDX-License-Identifier: Apache-2.0
"""`emit_pipeline`: copies of the next blocks run while the body works on this one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax, errors, expect
from pallas_gpu.entry import control, scope
from pallas_gpu.pipeline.loops import unravel
from pallas_gpu.sparsecore.pipeline.blocks import BlockSpec, Indirect, differ
from pallas_gpu.sparsecore.pipeline.partition import ARBITRARY, part_of_grid, semantics
from pallas_gpu.sparsecore.primitives.copies import make_async_copy
from pallas_gpu.sparsecore.primitives.scoped import run_scoped
from pallas_gpu.sparsecore.types import SMEM, VMEM, SemaphoreType
from pallas_gpu.types import values
from pallas_gpu.types.indexing import ds

_SLOTS = 2


def _sizes(value: Any, what: str) -> tuple[Any, ...]:
    value = value if expect.is_sequence(value) else (value,)
    sizes = tuple(values.index(n, what) for n in value)
    if any(isinstance(n, int) and n < 1 for n in sizes):
        raise errors.ArgumentError(
            f"{what} has a size that is not positive",
            expected="1 or more",
            got=str(sizes),
            hint="leave the pipeline out where there is nothing to do",
        )
    return sizes


@expect.arguments(
    grid=_sizes,
    core_axis_name=expect.anything,
    dimension_semantics=expect.optional(semantics),
)
def emit_pipeline(
    body: Callable[..., None],
    *,
    grid: Any,
    in_specs: Any = (),
    out_specs: Any = (),
    core_axis_name: str | Sequence[str] | None = None,
    dimension_semantics: Any = None,
) -> Callable[..., None]:
    """Runs a body over a grid inside a kernel, with copies of its blocks in flight.

    The steps run one after another, the last axis fastest. Each block has two buffers:
    while the body works on one, the next block of an argument arrives in the other, and
    the last block of a result leaves it. A block that is that of the step before is
    not copied again, so that steps can add to a block of a result.

    Issued by: a subcore. When it returns, all results are in the arrays.

    Args:
      body: `body(*input_refs, *output_refs, *scratches)`: references to blocks.
        `program_id` and `num_programs` in it are those of the grid.
      grid: sizes of the axes: ints, or int32 scalars.
      in_specs: a `BlockSpec` for each argument.
      out_specs: a `BlockSpec` for each result.
      core_axis_name: the axis of the mesh whose subcores share the steps, or several;
        None: each subcore that calls it runs all steps.
      dimension_semantics: for each axis `plsc.PARALLEL`, whose steps subcores may
        share, or `plsc.ARBITRARY`, the default.

    Returns:
      A function of the references, arguments first, and `scratches`, a sequence of
      references that the body gets behind them.

    Raises:
      ArgumentError, ArgumentTypeError: numbers of specs and references differ, or the
        grid and its semantics; subcores share a grid without a parallel axis.
      ShapeError: an array does not consist of whole blocks.

    Example:
      >>> spec = plsc.BlockSpec((1024,), lambda i: (i,))
      >>> plsc.emit_pipeline(double, grid=(64,), in_specs=[spec], out_specs=[spec],
      ...                    core_axis_name=("core", "subcore"),
      ...                    dimension_semantics=(plsc.PARALLEL,))(x_ref, o_ref)
    """
    ins, outs = _specs(in_specs), _specs(out_specs)
    kinds = dimension_semantics or (ARBITRARY,) * len(grid)
    if len(kinds) != len(grid):
        raise errors.ArgumentError(
            "emit_pipeline: dimension_semantics and grid have different lengths",
            expected=f"{len(grid)} entries, one for each axis",
            got=str(tuple(kinds)),
            hint="plsc.PARALLEL or plsc.ARBITRARY for each axis",
        )

    def run(*refs: Any, scratches: Sequence[Any] = ()) -> None:
        if len(refs) != len(ins) + len(outs):
            raise errors.ArgumentError(
                "emit_pipeline: numbers of specs and references differ",
                expected=f"{len(ins)} arguments and {len(outs)} results",
                got=f"{len(refs)} references",
                hint="pass a spec for each reference, in the same order",
            )
        for spec, ref in zip((*ins, *outs), refs, strict=True):
            spec.check(ref.shape, "an array")
        sizes, first = part_of_grid(grid, kinds, core_axis_name)
        _Pipeline(body, grid, sizes, first, tuple(scratches)).run(ins, outs, refs)

    return run


def _specs(given: Any) -> tuple[BlockSpec, ...]:
    specs = jax.tree.leaves(given)
    for spec in specs:
        if not isinstance(spec, BlockSpec):
            raise expect.wrong_type(
                "emit_pipeline: a spec", "a BlockSpec", "plsc.BlockSpec(...)", spec,
                "write plsc.BlockSpec(block_shape, index_map)",
            )  # fmt: skip
    return tuple(specs)


@dataclasses.dataclass(frozen=True)
class _Stream:
    """An array of a pipeline and its two buffers.

    Attributes:
      spec: which blocks the steps access.
      ref: the array.
      buffer: two blocks: of a vector one behind the other, else with a leading axis.
      sems: a semaphore for each buffer.
    """

    spec: BlockSpec
    ref: Any
    buffer: Any
    sems: Any

    def block(self, visit: Any) -> Any:
        """Returns the buffer of a visit: they alternate."""
        slot, shape = _slot(visit), self.spec.shape
        if len(shape) == 1:
            return self.buffer.at[ds(slot * shape[0], shape[0])]
        return self.buffer.at[slot]

    def fetch(self, index: Sequence[Any], visit: Any) -> Any:
        """Returns the copy of a block to its buffer."""
        part = self.spec.part(self.ref, index)
        return make_async_copy(part, self.block(visit), self.sems.at[_slot(visit)])

    def store(self, index: Sequence[Any], visit: Any) -> Any:
        """Returns the copy of a block from its buffer."""
        part = self.spec.part(self.ref, index)
        return make_async_copy(self.block(visit), part, self.sems.at[_slot(visit)])


def _slot(visit: Any) -> Any:
    """Returns the buffer of a visit."""
    return jax.lax.rem(visit, np.int32(_SLOTS))


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """The steps of one subcore.

    Attributes:
      body: the author's.
      grid: sizes of the axes of the whole grid.
      sizes, first: those of this subcore's part, and its first indices.
      scratches: further references for the body.
    """

    body: Callable[..., None]
    grid: tuple[Any, ...]
    sizes: tuple[Any, ...]
    first: tuple[Any, ...]
    scratches: tuple[Any, ...]

    @property
    def steps(self) -> Any:
        """How many steps this subcore runs."""
        return math.prod(self.sizes)

    def indices(self, step: Any) -> tuple[Any, ...]:
        """Returns the indices of a step on the whole grid."""
        own = unravel(step, self.sizes)
        return tuple(
            i if isinstance(f, int) and f == 0 else i + f
            for i, f in zip(own, self.first, strict=True)
        )

    def run(
        self, ins: Sequence[BlockSpec], outs: Sequence[BlockSpec], refs: Sequence[Any]
    ) -> None:
        """Allocates the buffers and runs all steps."""
        pairs = list(zip((*ins, *outs), refs, strict=True))
        copied = [(spec, ref) for spec, ref in pairs if not spec.is_whole]
        is_vector = scope.current_mesh("emit_pipeline").is_vector  # type: ignore
        declared = [_buffers(spec, ref, is_vector) for spec, ref in copied]

        def with_buffers(buffers: Sequence[Any], sems: Sequence[Any]) -> None:
            own = iter(zip(buffers, sems, strict=True))
            streams = [
                ref if spec.is_whole else _Stream(spec, ref, *next(own))
                for spec, ref in pairs
            ]
            with _jax.trace_without_ref_rules():
                self._run(streams[: len(ins)], streams[len(ins) :])

        run_scoped(with_buffers, declared, [SemaphoreType.DMA((_SLOTS,))] * len(copied))

    def _run(self, ins: list[Any], outs: list[Any]) -> None:
        fetched = [s for s in ins if isinstance(s, _Stream)]
        stored = [s for s in outs if isinstance(s, _Stream)]
        steps = self.steps
        zero = jnp.int32(0)

        @control.when(steps > 0)
        def _() -> None:
            for stream in fetched:
                stream.fetch(self._index(stream, zero), zero).start()

        def step(i: Any, visits: Any) -> Any:
            reads, writes = visits
            reads = [
                self._arrived(*x, i, steps) for x in zip(fetched, reads, strict=True)
            ]
            for stream, count in zip(stored, writes, strict=True):
                self._require_buffer(stream, count, i)
            visited = [*(visit for visit, _ in reads), *writes]
            pairs = zip([*fetched, *stored], visited, strict=True)
            blocks = iter([stream.block(visit) for stream, visit in pairs])
            operands = [
                next(blocks) if isinstance(s, _Stream) else s for s in (*ins, *outs)
            ]
            with scope.at_position(self.indices(i), self.grid):
                result = scope.call(
                    "emit_pipeline", self.body, *operands, *self.scratches
                )
            scope.require_none("emit_pipeline", self.body, result)
            pairs = zip(stored, writes, strict=True)
            return [r[1] for r in reads], [self._left(*x, i, steps) for x in pairs]

        start = ([zero for _ in fetched], [zero for _ in stored])
        _, counts = control.counted_loop(steps, step, start)
        for stream, count in zip(stored, counts, strict=True):
            self._drain(stream, count)

    def _index(self, stream: _Stream, step: Any) -> tuple[Any, ...]:
        return stream.spec.index(self.indices(step), "an array")

    def _changes(self, stream: _Stream, step: Any) -> Any:
        """Whether the block of a step is another one than that of the step before.

        Index maps may read memory: they get the positions of steps only.
        """
        if any(isinstance(entry, Indirect) for entry in stream.spec.entries):
            return True
        before = jnp.maximum(step - 1, 0)
        step = jnp.minimum(step, self.steps - 1)
        return differ(self._index(stream, step), self._index(stream, before))

    def _arrived(self, stream: _Stream, visit: Any, i: Any, steps: Any) -> Any:
        """Starts the next block, waits for that of step `i`; returns their visits."""
        changes = self._changes(stream, i + 1)
        more = (i + 1 < steps) & changes
        after = visit + jnp.where(more, 1, 0)

        @control.when(more)
        def _() -> None:
            stream.fetch(self._index(stream, i + 1), visit + 1).start()

        @control.when((i == 0) | self._changes(stream, i))
        def _() -> None:
            stream.fetch(self._index(stream, i), visit).wait()

        return visit, after

    def _require_buffer(self, stream: _Stream, count: Any, i: Any) -> None:
        """Waits for the store that left the buffer of a new block."""

        @control.when((count >= _SLOTS) & ((i == 0) | self._changes(stream, i)))
        def _() -> None:
            stream.store(self._index(stream, i), count).wait()

    def _left(self, stream: _Stream, count: Any, i: Any, steps: Any) -> Any:
        """Stores the block of step `i` if it is the last one for it."""
        last = (i + 1 == steps) | self._changes(stream, i + 1)

        @control.when(last)
        def _() -> None:
            stream.store(self._index(stream, i), count).start()

        return count + jnp.where(last, 1, 0)

    def _drain(self, stream: _Stream, count: Any) -> None:
        """Waits for the stores that are in flight: at most one of each buffer."""
        zero = jnp.int32(0)
        for behind in range(1, _SLOTS + 1):

            @control.when(count >= behind)
            def _(behind: int = behind) -> None:
                stream.store(self._index(stream, zero), count - behind).wait()


def _buffers(spec: BlockSpec, ref: Any, is_vector: bool) -> Any:
    """Returns the declaration of a stream's two buffers."""
    space = spec.memory_space or (VMEM if is_vector else SMEM)
    shape = spec.shape
    if len(shape) == 1:
        return space((_SLOTS * shape[0],), ref.dtype)
    return space((_SLOTS, *shape), ref.dtype)
