# SPDX-License-Identifier: Apache-2.0
"""The shell of a kernel: module, host function, launch, thread ids, SMEM base.

A `KernelBuilder` opens the launch and sets MLIR's insertion point inside it; emitters
then find it as `current()`. Everything it emits itself lies in the prologue, which
dominates the whole body: ids, constants and addresses are emitted once.

What a builder knows stands in the module: a tagged operation at the end of the prologue
holds the thread's ids, until `passes.lower_host_work` erases it. A later stage goes on
with any module of an earlier one, also with one that was read from a text: `reopen`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

from jax.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _mosaic_gpu_ext
from jaxlib.mlir.dialects import arith, builtin, func, gpu, llvm, memref, nvvm  # noqa: F401

from pallas_gpu import errors
from pallas_gpu.mosaic import barriers

WARPGROUP_THREADS = 128
WARP_THREADS = 32
# Constant memory (NVPTX address space 4): the launcher looks the symbol up.
_SCRATCH_GLOBAL = "global_scratch"
_FULL_MASK = -1
# The operation that ends the prologue; `pallas_gpu.` is for those on whole arrays.
# Its operands are those of `ThreadIds` and the start of the dynamic SMEM, in order.
PROLOGUE = "shell.prologue"

# Who runs the code that is emitted, and meets at its barriers.
Scope = Literal["warpgroup", "warp"]


@dataclasses.dataclass(frozen=True)
class LaunchSpec:
    """How a kernel is launched.

    Attributes:
      name: the kernel's symbol name.
      grid: blocks per axis, x first.
      cluster: blocks of one cluster per axis, x first; divides the grid.
      threads: threads of a block, a multiple of 128.
      smem_bytes: dynamic SMEM of a block.
      num_buffers: operands and results that the kernel gets.
      arch: compute capability, e.g. (9, 0).
    """

    name: str
    grid: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    threads: int = WARPGROUP_THREADS
    smem_bytes: int = 0
    num_buffers: int = 0
    arch: tuple[int, int] = (9, 0)

    def __post_init__(self) -> None:
        if self.threads < 1 or self.threads % WARPGROUP_THREADS:
            raise errors.ArgumentError(
                "A block consists of whole warpgroups",
                expected=f"a multiple of {WARPGROUP_THREADS} threads",
                got=self.threads,
            )
        for axis, (blocks, cluster) in enumerate(
            zip(self.grid, self.cluster, strict=True)
        ):
            if cluster < 1 or blocks % cluster:
                raise errors.ArgumentError(
                    f"The grid does not consist of whole clusters along axis {axis}",
                    expected=f"a multiple of {cluster} blocks",
                    got=blocks,
                )

    @property
    def has_cluster(self) -> bool:
        """True when a cluster holds more than one block."""
        return self.cluster != (1, 1, 1)

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block."""
        return self.threads // WARPGROUP_THREADS


@dataclasses.dataclass(frozen=True)
class ThreadIds:
    """Who a thread is; all values but the first two are equal within a warp.

    Attributes:
      warpgroup_thread: i32, 0 to 127, the thread's index in its warpgroup.
      lane: i32, 0 to 31.
      warp: i32, 0 to 3, the warp's index in its warpgroup.
      warpgroup: i32, the warpgroup's index in the block.
      block_id: three i32, x first.
      elected: i1, true in one lane of warp 0 of each warpgroup.
      warp_elected: i1, true in one lane of each warp; in warp 0 it is the same lane.
    """

    warpgroup_thread: ir.Value
    lane: ir.Value
    warp: ir.Value
    warpgroup: ir.Value
    block_id: tuple[ir.Value, ir.Value, ir.Value]
    elected: ir.Value
    warp_elected: ir.Value


# The process whose threads JAX's thread pool has.
_IMPORTED_BY = os.getpid()


class _OpenBuilders(threading.local):
    """The builders that a thread has open, innermost last.

    MLIR's current context and insertion point belong to a thread, and so does this.
    """

    def __init__(self) -> None:
        self.stack: list[KernelBuilder] = []


_open_builders = _OpenBuilders()


def current() -> KernelBuilder:
    """The innermost builder whose `with` block this thread has open."""
    if not _open_builders.stack:
        raise errors.InternalError(
            "Kernel code is emitted outside of a KernelBuilder",
            hint="emit inside `with KernelBuilder(spec) as kb:`",
        )
    return _open_builders.stack[-1]


def make_context() -> ir.Context:
    """An MLIR context with JAX's dialects and the `mosaic_gpu` dialect."""
    context = jax_mlir.make_ir_context()
    # The warpgroup-level module has elementwise operations of our own.
    context.allow_unregistered_dialects = True
    _mosaic_gpu_ext.register_dialect(context)
    if os.getpid() != _IMPORTED_BY:
        # JAX's contexts share one thread pool, whose threads a forked child lacks:
        # MLIR's verifier would wait for them forever.
        context.enable_multithreading(False)
    return context


@functools.cache
def _pointer_text(space: int) -> str:
    return f"!llvm.ptr<{space}>" if space else "!llvm.ptr"


def pointer_type(space: int = 0) -> ir.Type:
    """`!llvm.ptr` of an address space: 0 generic, 1 GMEM, 3 SMEM."""
    return ir.Type.parse(_pointer_text(space))


class KernelBuilder:
    """Builds the module of one kernel.

    Example:
      with KernelBuilder(LaunchSpec("copy", num_buffers=2)) as kb:
          ...  # emit the body
      passes.lower_host_work(kb.module)
      passes.share_subexpressions(kb.module)
      module = kb.finish()

    Attributes:
      spec: how the kernel is launched.
      buffers: the kernel's operands and results, `!llvm.ptr` in GMEM.
      smem_base: start of the dynamic SMEM, `!llvm.ptr<3>`.
      threads: the ids of the running thread.
      scope: who runs what is emitted now.
    """

    buffers: list[ir.Value]
    smem_base: ir.Value
    threads: ThreadIds

    def __init__(self, spec: LaunchSpec, context: ir.Context | None = None):
        self.spec = spec
        self.context = context if context is not None else make_context()
        self._scopes = contextlib.ExitStack()
        self._hoisted: dict[object, ir.Value] = {}
        self._finished = False
        self.scope: Scope = "warpgroup"

    @classmethod
    def reopen(cls, spec: LaunchSpec, module: ir.Module) -> KernelBuilder:
        """A builder that goes on with a complete module, whoever has built it.

        The `with` block of a builder whose body is complete inserts at the body's end.
        This one emits again what the first has emitted once; CSE joins the two.
        """
        builder = cls(spec, module.context)
        builder.module = module
        builder._launch = launch_of(module)
        builder._finished = True
        return builder

    # --- scopes -----------------------------------------------------------------------

    def __enter__(self) -> KernelBuilder:
        self._scopes.enter_context(self.context)
        # An ambient location is the caller's wish to keep source lines.
        ambient = ir.Location.current or ir.Location.unknown()
        self._scopes.enter_context(ambient)
        if self._finished:
            self._recover()
            end = self.body.operations[len(self.body.operations) - 1]
            self._scopes.enter_context(ir.InsertionPoint(end))
        else:
            self.module = ir.Module.create()
            self._emit_host_function()
            self._scopes.enter_context(ir.InsertionPoint(self.body))
        _open_builders.stack.append(self)
        self._scopes.callback(_open_builders.stack.pop)
        if not self._finished:
            self._emit_prologue()
        return self

    def __exit__(self, kind, value, traceback) -> None:
        try:
            if kind is None and not self._finished:
                gpu.terminator()
        finally:
            self._scopes.close()
        self._finished = kind is None

    def finish(self) -> ir.Module:
        """Drops the barriers that repeat each other, verifies and returns the module.

        Raises:
          InternalError: the body was not completed.
          CompilationError: MLIR refuses the module.
        """
        if not self._finished:
            raise errors.InternalError(
                "finish() before the kernel's `with` block has ended"
            )
        with self.context, ir.Location.unknown():
            barriers.drop_repeated(self.body)
        verify(self.module)
        return self.module

    @property
    def body(self) -> ir.Block:
        """The block of the launch, the kernel's code."""
        return self._launch.regions[0].blocks[0]

    # --- what emitters use ------------------------------------------------------------

    @contextlib.contextmanager
    def in_warp(self) -> Iterator[None]:
        """Marks the extent of code that each warp runs by itself."""
        outer, self.scope = self.scope, "warp"
        try:
            yield
        finally:
            self.scope = outer

    @property
    def elected(self) -> ir.Value:
        """i1: true in the one thread that issues for who runs the code."""
        if self.scope == "warp":
            return self.threads.warp_elected
        return self.threads.elected

    def set_smem_bytes(self, value: int) -> None:
        """Sets the dynamic SMEM of a block: what the body uses is known at its end."""
        i32 = ir.IntegerType.get_signless(32)
        constant = self._launch.dynamicSharedMemorySize.owner
        constant.attributes["value"] = ir.IntegerAttr.get(i32, value)

    def smem_pointer(self, offset_bytes: int) -> ir.Value:
        """Address `offset_bytes` behind the start of the dynamic SMEM."""
        if offset_bytes == 0:
            return self.smem_base
        return self.hoisted(
            ("smem", offset_bytes),
            lambda: llvm.getelementptr(
                self.smem_base.type,
                self.smem_base,
                [],
                [offset_bytes],
                ir.IntegerType.get_signless(8),
                None,
            ),
        )

    def hoisted(self, key: object, emit: Callable[[], ir.Value]) -> ir.Value:
        """The value that `emit` makes, emitted once, in the prologue.

        Args:
          key: hashable; equal keys mean equal values.
          emit: emits operations on constants and on earlier prologue values only.
        """
        value = self._hoisted.get(key)
        if value is None:
            with ir.InsertionPoint(self._anchor), ir.Location.unknown():
                value = emit()
            self._hoisted[key] = value
        return value

    def i32(self, value: int) -> ir.Value:
        """The i32 constant, emitted once."""
        return self.hoisted(
            ("i32", value),
            lambda: arith.constant(ir.IntegerType.get_signless(32), value),
        )

    def sync_after_init(self) -> None:
        """Makes initialised mbarriers visible before anybody uses them.

        PTX: `fence.mbarrier_init.release.cluster`, then `barrier.sync 0` or, in a
        cluster, `barrier.cluster.arrive.relaxed` and `.wait`. Since: sm_90. All threads
        of the block issue it, after the elected thread has initialised the mbarriers.
        """
        nvvm.fence_mbarrier_init()
        if self.spec.has_cluster:
            # The fence has released the initialisation (PTX ISA, membar / fence); an
            # arrival that releases too becomes a MEMBAR of the whole GPU in SASS.
            nvvm.cluster_arrive_relaxed(aligned=True)
            nvvm.cluster_wait(aligned=True)
        else:
            nvvm.barrier()

    def sync_before_exit(self) -> None:
        """Keeps a block of a cluster until all of them have finished.

        PTX: `barrier.cluster.arrive`, `barrier.cluster.wait`; nothing without a
        cluster. Since: sm_90. All threads of the block issue it last: a block may not
        end while others copy into its SMEM or arrive on its mbarriers.
        """
        if self.spec.has_cluster:
            nvvm.cluster_arrive(aligned=True)
            nvvm.cluster_wait(aligned=True)

    # --- the shell --------------------------------------------------------------------

    def _emit_host_function(self) -> None:
        spec = self.spec
        i32 = ir.IntegerType.get_signless(32)
        index = ir.IndexType.get()
        operation = self.module.operation
        operation.attributes["sym_name"] = ir.StringAttr.get(spec.name)
        for name, value in zip(("major", "minor"), spec.arch, strict=True):
            attribute = ir.IntegerAttr.get(i32, value)
            operation.attributes[f"mosaic_gpu.arch_{name}"] = attribute
        pointer = pointer_type()
        with ir.InsertionPoint(self.module.body):
            llvm.GlobalOp(
                ir.Type.parse("!llvm.array<0 x i8>"),
                _SCRATCH_GLOBAL,
                ir.Attribute.parse("#llvm.linkage<external>"),
                addr_space=4,
            )
            host = func.FuncOp(f"{spec.name}_mosaic_gpu", ([pointer, pointer], []))
        host.attributes["llvm.emit_c_interface"] = ir.UnitAttr.get()
        block = host.add_entry_block()
        token_pointer, buffer_table = block.arguments
        with ir.InsertionPoint(block):
            token_type = ir.Type.parse("!gpu.async.token")
            token = builtin.unrealized_conversion_cast([token_type], [token_pointer])
            self.buffers = []
            for i in range(spec.num_buffers):
                entry = llvm.getelementptr(
                    pointer, buffer_table, [], [i], pointer, None
                )
                self.buffers.append(llvm.load(pointer, entry))

            def extent(value: int) -> ir.Value:
                return arith.constant(index, value)

            smem_bytes = arith.constant(i32, spec.smem_bytes)
            cluster = {}
            if spec.has_cluster:
                names = ("clusterSizeX", "clusterSizeY", "clusterSizeZ")
                sizes = map(extent, spec.cluster)
                cluster = dict(zip(names, sizes, strict=True))
            self._launch = gpu.LaunchOp.__base__(
                token_type,
                [token],
                *map(extent, spec.grid),
                *map(extent, (spec.threads, 1, 1)),
                dynamicSharedMemorySize=smem_bytes,
                **cluster,
            )
            func.return_([])
        # The launch op names the ids of blocks and threads and their extents, three
        # each; with a cluster also its ids and extents.
        arguments = [index] * (18 if spec.has_cluster else 12)
        self._launch.regions[0].blocks.append(*arguments)

    def _emit_prologue(self) -> None:
        i32 = ir.IntegerType.get_signless(32)

        def constant(value: int) -> ir.Value:
            return arith.constant(i32, value)

        zero = constant(0)
        thread = nvvm.ThreadIdXOp(
            results=[i32],
            range=ir.Attribute.parse(
                f"#llvm.constant_range<i32, 0, {self.spec.threads}>"
            ),
        ).result
        lane = arith.andi(thread, constant(WARP_THREADS - 1))
        # Reading lane 0's value tells the compiler that a warp agrees.
        warp_in_block = nvvm.shfl_sync(
            constant(_FULL_MASK),
            arith.shrui(thread, constant(5)),
            zero,
            constant(WARP_THREADS - 1),
            nvvm.ShflKind.idx,
            results=[i32],
        )
        if self.spec.warpgroups == 1:
            in_warpgroup, warp, warpgroup = thread, warp_in_block, zero
        else:
            in_warpgroup = arith.andi(thread, constant(WARPGROUP_THREADS - 1))
            warp = arith.andi(warp_in_block, constant(3))
            warpgroup = arith.shrui(warp_in_block, constant(2))
        leader = arith.cmpi(arith.CmpIPredicate.eq, warp, zero)
        i1 = ir.IntegerType.get_signless(1)
        warp_elected = nvvm.elect_sync(results=[i1])
        elected = arith.andi(warp_elected, leader)
        block_id = tuple(
            op(results=[i32]).result if extent > 1 else zero
            for op, extent in zip(
                (nvvm.BlockIdXOp, nvvm.BlockIdYOp, nvvm.BlockIdZOp),
                self.spec.grid,
                strict=True,
            )
        )
        self.threads = ThreadIds(
            in_warpgroup, lane, warp, warpgroup, block_id, elected, warp_elected
        )
        self.smem_base = _smem_base()
        # Whatever is hoisted later goes before this operation.
        ids = (in_warpgroup, lane, warp, warpgroup, *block_id, elected, warp_elected)
        self._anchor = ir.Operation.create(PROLOGUE, operands=[*ids, self.smem_base])

    def _recover(self) -> None:
        """Finds in the module what the first builder knew of it."""
        if hasattr(self, "threads"):
            return
        host = self._launch.operation.block
        loads = [op.result for op in host.operations if isinstance(op, llvm.LoadOp)]
        self.buffers = loads[: self.spec.num_buffers]
        found = [
            o.operation for o in self.body.operations if o.operation.name == PROLOGUE
        ]
        if len(found) != 1:
            raise errors.InternalError(
                "the module's prologue is gone",
                expected="a module before its host work is lowered",
            )
        (self._anchor,) = found
        thread, lane, warp, warpgroup, x, y, z, *rest = self._anchor.operands
        elected, warp_elected, self.smem_base = rest
        self.threads = ThreadIds(
            thread, lane, warp, warpgroup, (x, y, z), elected, warp_elected
        )


def launch_of(module: ir.Module) -> Any:
    """The `gpu.launch` of a module.

    Raises:
      InternalError: there is none, or more than one.
    """
    found = [
        op
        for host in module.body.operations
        if isinstance(host, func.FuncOp) and not host.is_external
        for op in host.entry_block.operations
        if isinstance(op, gpu.LaunchOp)
    ]
    if len(found) != 1:
        raise errors.InternalError(
            "a kernel's module has one gpu.launch", got=f"{len(found)} of them"
        )
    return found[0]


def verify(module: ir.Module) -> None:
    """Verifies a module.

    Raises:
      CompilationError: MLIR refuses it.
    """
    with refusals(module):
        module.operation.verify()


@contextlib.contextmanager
def refusals(module: ir.Module) -> Iterator[None]:
    """Turns MLIR's refusal of a kernel's module into a CompilationError."""
    try:
        yield
    except ir.MLIRError as error:
        attributes = module.operation.attributes
        name = attributes["sym_name"].value if "sym_name" in attributes else ""
        raise errors.CompilationError(
            f"MLIR refuses the module of kernel {name!r}", got=str(error)
        ) from error


def _smem_base() -> ir.Value:
    space = ir.Attribute.parse("#gpu.address_space<workgroup>")
    i8 = ir.IntegerType.get_signless(8)
    dynamic = ir.MemRefType.get(
        [ir.ShapedType.get_dynamic_size()], i8, memory_space=space
    )
    block = gpu.dynamic_shared_memory(dynamic)
    descriptor = ir.Type.parse(
        "!llvm.struct<(ptr<3>, ptr<3>, i64, array<1 x i64>, array<1 x i64>)>"
    )
    unpacked = builtin.unrealized_conversion_cast([descriptor], [block])
    return llvm.extractvalue(pointer_type(3), unpacked, [1])
