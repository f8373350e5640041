# SPDX-License-Identifier: Apache-2.0
"""The context of a lowering rule, and the loop over operations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import _jax, arch, errors, resources, types
from pallas_gpu.emitters import (
    addressing,
    cluster,
    elementwise,
    gmem,
    mbarrier,
    smem,
)
from pallas_gpu.emitters import module as emission
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.devices import peers
from pallas_gpu.emitters.elements import arith, dtypes
from pallas_gpu.emitters.tensor_cores import tmem
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering import notes
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.references import Reference
from pallas_gpu.lowering.traits import Traits
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.nodes import (
    Access,
    Constant,
    Op,
    Operand,
    Region,
    Value,
    mapped,
)


@dataclasses.dataclass
class KernelState:
    """The state of a kernel while it is lowered.

    Attributes:
      params: parameters of the call.
      target: the target of the compilation.
      builder: the open module.
      plan: allocation of SMEM, TMEM and barriers.
      state: register state that loops and branches carry: parity bits of each barrier
        declaration (a scalar i32), and live accumulators (arrays).
      settled: values of accumulators that no product under way adds to, by their keys.
      smem_top_bytes: tops of the stacks of SMEM arrays: of the block, and of the
        warpgroup and of the warp that execute the code.
      tmem_top_columns: likewise of arrays in TMEM.
      tmem: the `Allocation` of the block's TMEM, if it has any.
      axes: index of each named axis, emitted once in the prologue.
      trial: the block of a trial, which only determines layouts and is erased; None
        while code is emitted.
      where: returns the line of the equation that is lowered, or the operation that is
        expanded.
      layouts: who chooses the layouts of arrays, a `choice.authored.Authored`.
      recorder: the `Recorder` of a profiled kernel, from its start.
      path: the regions around the operation that is lowered, as inference knows them.
      moved: for each open block the arrays that were moved to another layout there: a
        block's values are not visible after its end.
    """

    params: CallParams
    target: arch.GpuTarget
    builder: emission.KernelBuilder
    plan: resources.Plan
    layouts: Any
    recorder: Any = None
    state: dict[Any, Any] = dataclasses.field(default_factory=dict)
    settled: dict[Any, Any] = dataclasses.field(default_factory=dict)
    smem_top_bytes: dict[resources.Owner, int] = dataclasses.field(
        default_factory=lambda: {"block": 0, "warpgroup": 0, "warp": 0}
    )
    tmem_top_columns: int = 0
    tmem: Any = None
    axes: dict[Any, ir.Value] = dataclasses.field(default_factory=dict)
    trial: ir.Block | None = None
    where: Callable[[], str | None] = lambda: None
    path: tuple[tuple[Op, int, int], ...] = ()
    moved: list[dict[Any, Any]] = dataclasses.field(default_factory=lambda: [{}])

    @functools.cached_property
    def traits(self) -> Traits:
        """What holds of the kernel as a whole."""
        return Traits.of(self.params.jaxpr)

    @property
    def keeps_lines(self) -> bool:
        """Whether operations carry the lines of their equations."""
        return self.params.compiler_params.line_info

    @property
    def rules(self) -> Mapping[Any, Callable[..., Any]]:
        """The rule of each primitive."""
        return registry.rules(registry.RuleKind.EMIT)

    @contextlib.contextmanager
    def in_block(self, block: Any) -> Iterator[None]:
        """Emits at the end of a block."""
        self.moved.append({})
        with ir.InsertionPoint(block):
            yield
        self.moved.pop()

    def finished(self, ctx: RuleContext, results: Sequence[Any]) -> Sequence[Any]:
        """Returns the results of a rule in their layouts."""
        return [self.layouts.result(ctx, x, i) for i, x in enumerate(results)]

    def constant(self, value: Any, dtype: Any) -> Any:
        """Returns a scalar that is known in advance."""
        return elementwise.scalar(value, dtype)

    def part(self, access: Access, read: Callable[[Operand], Any]) -> Reference:
        """Returns a part of a reference, an operand of a rule."""
        return Reference.of(access, read)

    def no_rule(self, op: Op) -> errors.PallasGpuError:
        """Returns the error for a primitive without a rule."""
        return errors.UnsupportedError(
            f"{op.name} is not supported on {self.target.name}",
            hint="see docs/coverage.md for what is supported",
            where=op.where,
        )


@dataclasses.dataclass(eq=False, slots=True)
class RuleContext:
    """The context of one operation.

    Attributes:
      kernel: the kernel that is lowered.
      op: the operation.
    """

    kernel: KernelState
    op: Op
    region: Region

    @property
    def eqn(self) -> _jax.JaxprEqn:
        """The operation's equation."""
        return self.op.equation

    @property
    def builder(self) -> emission.KernelBuilder:
        """The open module."""
        return self.kernel.builder

    @property
    def out_aval(self) -> Any:
        """Type of the single result."""
        return self.op.results[0].aval

    @property
    def is_read(self) -> bool:
        """Whether anything reads the single result."""
        return bool(self.readers)

    @property
    def readers(self) -> list[Op | None]:
        """What reads the single result; None is the region's end."""
        (value,) = self.op.results
        found: list[Op | None] = [op for op in self.region.ops if value in op.inputs]
        return [*found, None] if value in self.region.results else found

    # --- layouts ----------------------------------------------------------------------

    def is_splat(self, x: Any) -> bool:
        """Whether all elements of an operand are known to be equal."""
        return isinstance(x, regs.Splat)

    def splat(self, x: regs.Splat, aval: Any, slot: Any = 0) -> regs.Splat:
        """Returns a result whose elements are all that of a splat."""
        return regs.splat(x.value, x.dtype, aval.shape)

    def operand(self, x: Any, slot: Any = 0) -> Any:
        """Returns an operand in the layout that inference has assigned, if it has.

        Args:
          slot: which operand, as in the relation of the primitive.
        """
        return self.kernel.layouts.operand(self, x, slot)

    def placed(self, x: Any, slot: Any = 0) -> regs.RegisterArray:
        """As `operand`, materialized in registers."""
        return self.kernel.layouts.placed(self, x, slot)

    def result(self, x: Any, slot: Any) -> Any:
        """Returns an intermediate result in its assigned layout."""
        return self.kernel.layouts.result(self, x, slot)

    def target(self, slot: Any = 0) -> Any:
        """Returns the assigned layout of a result; None if there is none."""
        return self.kernel.layouts.target(self, slot)

    def run(self, i: int, args: Sequence[Any], copy: int = 0) -> list[Any]:
        """Lowers a region of the operation; returns its results.

        Args:
          copy: which copy of an unrolled body.
        """
        kernel, outer = self.kernel, self.kernel.path
        kernel.path = (*outer, (self.op, i, copy))
        results = lower_region(kernel, self.op.regions[i], args)
        kernel.path = outer
        return results

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Orders a store in the body with the accesses of the warpgroup's warps."""
        automatic = not self.kernel.params.compiler_params.unsafe_no_auto_barriers
        if automatic:
            # Another warp may still read what the store overwrites.
            mbarrier.synchronize()
        yield
        if automatic:
            mbarrier.synchronize()

    def view(self, ref: Reference) -> Any:
        """Returns the view of a part of an array in memory, or a barrier's address."""
        handle = ref.handle
        match handle:
            case vals.BarrierHandle():
                return _barrier_pointer(handle, ref.element())
            case tmem.TmemView():
                return dataclasses.replace(handle, window=ref.in_tmem())
            case smem.SmemView():
                window, bits = ref.in_memory(), dtypes.stored_bits(ref.dtype)
                layout = handle.layout.reinterpreted(window.array_shape, bits)
                return dataclasses.replace(
                    handle, layout=layout, dtype=ref.dtype, window=window
                )
            case vals.GmemHandle():
                index, pointer = handle.buffer_index, None
                # A mesh of one device has no memory of others.
                owner = ref.owner if self.builder.spec.devices > 1 else None
                if handle.listed:
                    pointer = peers.listed(self.builder.buffers[index], owner)
                elif owner is None:
                    pointer = self.builder.buffers[index]
                else:
                    pointer = peers.address(index, owner)
                return gmem.GmemView(pointer, index, ref.dtype, ref.in_memory(), owner)
        raise errors.InternalError(f"{type(handle).__name__} is not an array in memory")

    def argument(self, x: Any) -> Any:
        """Returns a scalar or a part of a reference as emitters take it, or None."""
        if x is None:
            return None
        return self.view(x) if isinstance(x, Reference) else vals.scalar_value(x)

    @property
    def collective(self) -> bool:
        """Whether the operation is one of a pair of CTAs."""
        return self.op.params["collective_axis"] is not None

    @property
    def shared_by(self) -> cluster.Group | None:
        """The CTAs that share the operation's work."""
        axes = self.op.params["collective_axes"]
        return self.group(axes) if axes else None

    def group(self, axes: Sequence[str]) -> cluster.Group:
        """Returns the CTAs along some cluster axes, this one among them."""
        mesh = self.kernel.params.mesh
        names = list(mesh.cluster_names)
        return cluster.group(tuple(mesh.cluster), [names.index(a) for a in axes])

    def operands(self, invals: Sequence[Any]) -> Any:
        """Returns the operands by name; parts of references are `Reference`s."""
        return self._read(self.op.operands, invals)

    def named(self, names: Sequence[str], invals: Sequence[Any]) -> Sequence[Any]:
        """Returns the operands of some names."""
        return self._read([self.op.operands[name] for name in names], invals)

    def _read(self, operands: Any, invals: Sequence[Any]) -> Any:
        env: dict[Any, Any] = dict(zip(self.op.inputs, invals, strict=True))

        def of(x: Any) -> Any:
            part = isinstance(x, Access)
            return self.kernel.part(x, env.__getitem__) if part else env[x]

        return mapped(of, operands)


def _barrier_pointer(handle: vals.BarrierHandle, index: int | ir.Value) -> ir.Value:
    first, distance, size = handle.offset_bytes, handle.distance, types.BARRIER_BYTES
    if isinstance(index, int):
        return addressing.own_smem_pointer(first + size * index, distance)
    offset = arith.muli(index, emission.current().i32(size))
    pointer = addressing.own_smem_pointer(first, distance)
    return addressing.offset_pointer(pointer, offset)


# --- the operation loop ---------------------------------------------------------------


def lower_region(kernel: Any, region: Region, args: Sequence[Any]) -> list[Any]:
    """Lowers the operations of a region in order; returns its results.

    Args:
      kernel: the state of the machine: a `KernelState`, or what has the same methods.
      args: values of the region's inputs.
    """
    env: dict[Value, Any] = dict(zip(region.inputs, args, strict=True))

    def read(operand: Operand) -> Any:
        if isinstance(operand, Constant):
            return kernel.constant(operand.value.item(), operand.dtype)
        return env[operand]

    rules = kernel.rules
    keeps_lines = kernel.keeps_lines
    around = ir.Location.current or ir.Location.unknown()
    caller = kernel.where
    noted = notes.current()
    for op in region.ops:
        rule = rules.get(op.primitive)
        if rule is None:
            raise kernel.no_rule(op).with_location(op.where)
        kernel.where = lambda op=op: op.where or caller()
        try:
            if noted is not None:
                noted.enter(op)
            with _location(op, around) if keeps_lines else around:
                ctx = RuleContext(kernel, op, region)
                results = rule(ctx, *map(read, op.inputs))
                if not op.primitive.multiple_results:
                    results = [results]
                elif results is None:
                    results = []
                results = kernel.finished(ctx, results)
        except errors.PallasGpuError as error:
            raise error.with_location(op.where) from None
        env.update(zip(op.results, results, strict=True))
        if noted is not None:
            noted.leave()
    kernel.where = caller
    return [read(x) for x in region.results]


def _location(op: Op, around: ir.Location) -> ir.Location:
    noted = notes.current()
    if noted is not None:
        return ir.Location.file("operations", noted.number(op), 0)
    for eqn in (op.equation, *reversed(op.calls)):
        place = _jax.file_and_line(eqn)
        if place is not None:
            return ir.Location.file(place[0], place[1], 0)
    return around


def state_keys(ctx: RuleContext, args: Sequence[Any]) -> list[Any]:
    """Returns the register state that the regions of an operation may use.

    These are the barriers and accumulators among its operands, and the barriers that
    its scopes declare: a barrier's phase outlives its scope. An accumulator does not.
    """
    kernel, stateful = ctx.kernel, vals.BarrierHandle | vals.AccumulatorHandle
    keys = {key for a in args if isinstance(a, stateful) for key in a.keys}
    for scope in resources.scopes(kernel.params.jaxpr):
        if ctx.op in [site.op for site in scope.enclosing]:
            for key, aval in resources.barriers_of(scope):
                keys.update(aval.barrier.parity_keys(kernel.plan.barrier_slots[key]))
    return [key for key in kernel.state if key in keys]


# --- positions ------------------------------------------------------------------------


def emit_axes(kernel: KernelState) -> None:
    """Splits the linear block index into the grid's and the batch's axes.

    All axes are mapped to CUDA's x axis, whose limit is 2**31 - 1, except those of a
    `CudaMesh`, whose body does not name them. The last axis varies
    fastest; the cluster's axes are the last, so that a cluster consists of consecutive
    blocks.
    """
    mesh = kernel.params.mesh
    batch = [(("batch", i), axis.size) for i, axis in enumerate(kernel.params.batch)]
    named = zip(mesh.grid_names, mesh.grid, strict=True)
    cluster = zip(mesh.cluster_names, mesh.cluster, strict=True)
    axes = [*batch, *named, *cluster]
    builder = kernel.builder
    if isinstance(mesh, types.CudaMesh):
        return
    rest = builder.threads.block_id[0]
    for i, (name, size) in reversed(list(enumerate(axes))):
        outermost = math.prod(n for _, n in axes[:i]) == 1
        if size == 1:
            kernel.axes[name] = builder.i32(0)
        elif outermost:
            kernel.axes[name] = rest
        else:
            kernel.axes[name] = arith.remui(rest, builder.i32(size))
            rest = arith.divui(rest, builder.i32(size))
    if mesh.thread_name is not None:
        kernel.axes[mesh.thread_name] = builder.threads.warpgroup
