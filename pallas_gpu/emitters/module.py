# SPDX-License-Identifier: Apache-2.0
"""The frame of a kernel: module, host function, launch, thread ids, SMEM base.

A `KernelBuilder` opens the launch and sets MLIR's insertion point inside it; emitters
then find it as `current()`. What it emits itself is placed in the prologue, which
dominates the whole body: ids, constants and addresses are emitted once.

The state of a builder is stored in the module: a tagged operation at the end of the
prologue has the thread's ids as operands, until `passes.lower_host_work` erases it. A
later stage can continue any module of an earlier one, even a parsed one: `reopen`.
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
from jaxlib.mlir.dialects import builtin, func, gpu, llvm, memref, nvvm, scf  # noqa: F401

from pallas_gpu import errors
from pallas_gpu.emitters import launch_spec, operations
from pallas_gpu.emitters.elements import arith
from pallas_gpu.emitters.launch_spec import WARPGROUP_THREADS as WARPGROUP_THREADS
from pallas_gpu.emitters.launch_spec import LaunchSpec as LaunchSpec
from pallas_gpu.emitters.program import barriers, exits, order

WARP_THREADS = 32
# Constant memory (NVPTX address space 4); the launcher looks up the symbol.
_SCRATCH_GLOBAL = "global_scratch"
_FULL_MASK = -1
# The operation that ends the prologue; `pallas_gpu.` is reserved for array operations.
# Its operands are the fields of `ThreadIds` and the start of the dynamic SMEM.
PROLOGUE = "shell.prologue"
# On the launch: the most registers that a thread may have.
_REGISTER_LIMIT = "pallas_gpu.register_limit"
PROLOGUE_ELECTED = 7  # its operand `elected`

# The threads that execute the emitted code and that its barriers synchronize.
Issuer = Literal["warpgroup", "warp", "thread"]


@dataclasses.dataclass(frozen=True)
class ThreadIds:
    """The ids of a thread; all but `warpgroup_thread` and `lane` are warp-uniform.

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


# The process that owns the threads of JAX's thread pool.
_IMPORTED_BY = os.getpid()


class _OpenBuilders(threading.local):
    """The builders that are open in a thread, innermost last.

    MLIR's current context and insertion point are thread-local, so this is too.
    """

    def __init__(self) -> None:
        self.stack: list[KernelBuilder] = []


_open_builders = _OpenBuilders()


def current() -> KernelBuilder:
    """The innermost builder whose `with` block is open in this thread."""
    if not _open_builders.stack:
        raise errors.InternalError(
            "No KernelBuilder is open",
            hint="please report it with the kernel",
        )
    return _open_builders.stack[-1]


def make_context() -> ir.Context:
    """An MLIR context with JAX's dialects and the `mosaic_gpu` dialect."""
    context = jax_mlir.make_ir_context()
    # The elementwise operations of the warpgroup-level module are our own dialect's.
    context.allow_unregistered_dialects = True
    _mosaic_gpu_ext.register_dialect(context)
    if os.getpid() != _IMPORTED_BY:
        # JAX's contexts share one thread pool, whose threads do not exist in a forked
        # child: MLIR's verifier would wait for them forever.
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
      device_words: where the buffers of other devices are, `!llvm.ptr` in GMEM.
      smem_base: start of the dynamic SMEM, `!llvm.ptr<3>`.
      threads: the ids of the executing thread.
      issuer: the threads that execute the code that is being emitted.
      extended: of each value that is a conversion to a wider float, the narrow one.
      owned: of pointers to buffers of other devices, the buffer and whose it is.
    """

    buffers: list[ir.Value]
    device_words: ir.Value
    smem_base: ir.Value
    threads: ThreadIds

    def __init__(self, spec: LaunchSpec, context: ir.Context | None = None):
        self.spec = spec
        self.context = context if context is not None else make_context()
        self._contexts = contextlib.ExitStack()
        self._hoisted: dict[object, ir.Value] = {}
        self._attributes: dict[object, Any] = {}
        self._finished = False
        self.issuer: Issuer = "warpgroup"
        self.extended: dict[ir.Value, ir.Value] = {}
        self.owned: dict[ir.Value, tuple[int, Any]] = {}

    @classmethod
    def reopen(cls, spec: LaunchSpec, module: ir.Module) -> KernelBuilder:
        """A builder that continues a complete module, however it was built.

        The `with` block of a builder whose body is complete inserts at the body's end.
        This builder emits hoisted values a second time; CSE merges the duplicates.
        """
        builder = cls(spec, module.context)
        builder.module = module
        builder._launch = launch_of(module)
        builder._finished = True
        return builder

    # --- contexts ---------------------------------------------------------------------

    def __enter__(self) -> KernelBuilder:
        self._contexts.enter_context(self.context)
        # An enclosing location means that the caller keeps source lines.
        ambient = ir.Location.current or ir.Location.unknown()
        self._contexts.enter_context(ambient)
        if self._finished:
            self._recover()
            # As in a builder of the module's text, so that both emit equal modules.
            self._hoisted.clear()
            end = self.body.operations[len(self.body.operations) - 1]
            self._contexts.enter_context(ir.InsertionPoint(end))
        else:
            self.module = ir.Module.create()
            self._emit_host_function()
            self._contexts.enter_context(ir.InsertionPoint(self.body))
        _open_builders.stack.append(self)
        self._contexts.callback(_open_builders.stack.pop)
        if not self._finished:
            self._emit_prologue()
        return self

    def __exit__(self, kind, value, traceback) -> None:
        try:
            if kind is None and not self._finished:
                gpu.terminator()
        finally:
            self._contexts.close()
        self._finished = kind is None

    def finish(self) -> ir.Module:
        """Removes redundant barriers and waits, verifies and returns the module.

        Raises:
          InternalError: the body is incomplete.
          CompilationError: the module does not verify.
        """
        if not self._finished:
            raise errors.InternalError("finish() inside the kernel's `with` block")
        with self.context, ir.Location.unknown():
            barriers.drop_repeated(self._launch.operation)
            exits.relax_last_wait(self.body)
        verify(self.module)
        return self.module

    @property
    def body(self) -> ir.Block:
        """The block of the launch: the kernel's code."""
        return self._launch.regions[0].blocks[0]

    # --- what emitters use ------------------------------------------------------------

    def in_warp(self) -> contextlib.AbstractContextManager[None]:
        """Makes the warp the issuer, for code that each warp executes on its own."""
        return self._issued_by("warp")

    def in_thread(self) -> contextlib.AbstractContextManager[None]:
        """Makes the thread the issuer, for code that its author has given to one."""
        return self._issued_by("thread")

    @contextlib.contextmanager
    def _issued_by(self, issuer: Issuer) -> Iterator[None]:
        outer, self.issuer = self.issuer, issuer
        try:
            yield
        finally:
            self.issuer = outer

    @property
    def issuer_threads(self) -> int:
        """The number of threads of the issuer."""
        threads = {"thread": 1, "warp": WARP_THREADS}
        return threads.get(self.issuer, WARPGROUP_THREADS)

    @property
    def issuer_thread(self) -> ir.Value:
        """i32: the index of the thread in the issuer, a warp or a warpgroup."""
        warp = self.issuer == "warp"
        return self.threads.lane if warp else self.threads.warpgroup_thread

    @property
    def elected(self) -> ir.Value:
        """i1: true in the one thread that issues instructions for the issuer."""
        if self.issuer == "thread":
            i1 = ir.IntegerType.get_signless(1)
            return self.hoisted("itself", lambda: arith.constant(i1, 1))
        if self.issuer == "warp":
            return self.threads.warp_elected
        return self.threads.elected

    def set_smem_bytes(self, value: int) -> None:
        """Sets the dynamic SMEM per block, which is known once the body is emitted."""
        i32 = ir.IntegerType.get_signless(32)
        constant = self._launch.dynamicSharedMemorySize.owner
        constant.attributes["value"] = ir.IntegerAttr.get(i32, value)

    def limit_registers(self, count: int) -> None:
        """Sets the most registers that a thread may have."""
        i32 = ir.IntegerType.get_signless(32)
        attribute = ir.IntegerAttr.get(i32, count)
        self._launch.operation.attributes[_REGISTER_LIMIT] = attribute

    def smem_pointer(self, offset_bytes: int) -> ir.Value:
        """The address at `offset_bytes` from the start of the dynamic SMEM."""
        if offset_bytes == 0:
            return self.smem_base
        return self.hoisted(
            ("smem", offset_bytes),
            lambda: operations.offset(self.smem_base, offset_bytes),
        )

    def hoisted(self, key: object, emit: Callable[[], ir.Value]) -> ir.Value:
        """The result of `emit`, emitted once, in the prologue.

        Args:
          key: hashable; equal keys imply equal values.
          emit: emits operations on constants and earlier prologue values only.
        """
        value = self._hoisted.get(key)
        if value is None:
            with ir.InsertionPoint(self._anchor), ir.Location.unknown():
                value = emit()
            self._hoisted[key] = value
        return value

    def declare(self, name: str, type_: ir.Type) -> None:
        """Declares a function of libdevice, of two operands of its result's type."""
        if name not in ir.SymbolTable(self.module.operation):
            kind = ir.Attribute.parse(f"!llvm.func<{type_} ({type_}, {type_})>")
            with ir.InsertionPoint(self.module.body), ir.Location.unknown():
                llvm.LLVMFuncOp(name, kind)

    @contextlib.contextmanager
    def discarding(self) -> Iterator[None]:
        """Forgets what is known of the values made inside, which are then erased.

        MLIR gives their addresses, by which values are equal, to later ones.
        """
        extended, owned = dict(self.extended), dict(self.owned)
        try:
            yield
        finally:
            self.extended, self.owned = extended, owned

    def attributes[T](self, key: object, make: Callable[[], T]) -> T:
        """The attributes that hundreds of operations share, created once.

        Args:
          key: hashable; equal keys imply equal attributes.
          make: creates them.
        """
        known = self._attributes.get(key)
        if known is None:
            known = self._attributes[key] = make()
        return known

    def i32(self, value: int | ir.Value) -> ir.Value:
        """The i32 constant, emitted once; a value that is not known as it is."""
        if isinstance(value, ir.Value):
            return value
        return self.hoisted(
            ("i32", value),
            lambda: operations.constant(ir.IntegerType.get_signless(32), value),
        )

    def sync_after_init(self) -> None:
        """Makes initialized mbarriers visible to all threads before their first use.

        PTX: `fence.mbarrier_init.release.cluster`, then that of `sync_cluster`. Since:
        sm_90. All threads of the block issue it, after the elected thread has
        initialized the mbarriers.
        """
        nvvm.fence_mbarrier_init()
        # The fence has released the initialization (PTX ISA, membar / fence); an
        # arrival with release semantics becomes a MEMBAR at GPU scope in SASS.
        self.sync_cluster(is_relaxed=True)

    def sync_before_exit(self, *, is_relaxed: bool = False) -> None:
        """Blocks the exit of a CTA until all CTAs of its cluster have finished.

        PTX: that of `sync_cluster`; none without a cluster, or where that ends the body
        already. Since: sm_90. All threads
        of the block issue it last: a block must not exit while others copy into its
        SMEM or arrive on its mbarriers.

        Args:
          is_relaxed: each block has waited for what others send to it. The arrival is
            relaxed then: with release semantics it waits for the stores to GMEM, too.
        """
        if not self.spec.has_cluster:
            return
        # Inline code leaves loads of variables behind it, the phases of its barriers.
        last = [
            op.operation.name
            for op in self.body.operations
            if not (op.operation.name == "memref.load" and len(op.operands) == 1)
        ][-2:]
        if last != ["nvvm.cluster.arrive", "nvvm.cluster.wait"]:
            self.sync_cluster(is_relaxed=is_relaxed)

    def sync_cluster(self, *, is_relaxed: bool = False) -> None:
        """Waits until all threads of the cluster, or of the only block, have arrived.

        PTX: `barrier.cluster.arrive{.relaxed}`, `barrier.cluster.wait`; without a
        cluster `barrier.sync 0`. Since: sm_90.

        Args:
          is_relaxed: the arrival orders no memory accesses.
        """
        if not self.spec.has_cluster:
            nvvm.barrier()
            return
        arrive = nvvm.cluster_arrive_relaxed if is_relaxed else nvvm.cluster_arrive
        arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)

    # --- the frame --------------------------------------------------------------------

    def _emit_host_function(self) -> None:
        spec = self.spec
        i32 = ir.IntegerType.get_signless(32)
        index = ir.IndexType.get()
        operation = self.module.operation
        operation.attributes["sym_name"] = ir.StringAttr.get(spec.name)
        for name, value in zip(("major", "minor"), spec.arch, strict=True):
            attribute = ir.IntegerAttr.get(i32, value)
            operation.attributes[f"mosaic_gpu.arch_{name}"] = attribute
        if spec.waits_for_grids:
            # The launcher of the plugin reads it.
            operation.attributes["mosaic_gpu.uses_pdl"] = ir.UnitAttr.get()
        if spec.multicasts:
            operation.attributes["mosaic_gpu.multimem_used"] = ir.UnitAttr.get()
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
            loads = []
            for i in range(num_pointers(spec)):
                entry = llvm.getelementptr(
                    pointer, buffer_table, [], [i], pointer, None
                )
                loads.append(llvm.load(pointer, entry))
            self._take_pointers(loads)

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
                *map(extent, spec.block_dims),
                dynamicSharedMemorySize=smem_bytes,
                **cluster,
            )
            func.return_([])
        # The block arguments of the launch op are the ids and extents of blocks and
        # threads, three each; with a cluster also its ids and extents.
        arguments = [index] * (18 if spec.has_cluster else 12)
        self._launch.regions[0].blocks.append(*arguments)

    def _take_pointers(self, loads: list[ir.Value]) -> None:
        """Keeps the pointers that the host function loads."""
        buffers = self.spec.num_buffers
        self.buffers = loads[:buffers]
        if self.spec.devices > 1:
            self.device_words = loads[buffers]

    def _emit_prologue(self) -> None:
        i32 = ir.IntegerType.get_signless(32)

        def constant(value: int) -> ir.Value:
            return arith.constant(i32, value)

        zero = constant(0)
        thread = launch_spec.thread_in_block(self.spec.block_dims)
        lane = arith.andi(thread, constant(WARP_THREADS - 1))
        # A shuffle from lane 0 tells the compiler that the value is warp-uniform.
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
        # Values hoisted later are inserted before this operation.
        ids = (in_warpgroup, lane, warp, warpgroup, *block_id, elected, warp_elected)
        self._anchor = ir.Operation.create(PROLOGUE, operands=[*ids, self.smem_base])

    def _recover(self) -> None:
        """Restores the first builder's state from the module."""
        if hasattr(self, "threads"):
            return
        host = self._launch.operation.block
        loads = [op.result for op in host.operations if isinstance(op, llvm.LoadOp)]
        self._take_pointers(loads)
        anchor = order.first_of(self._launch.operation, PROLOGUE)
        if anchor is None:
            what = "the module does not have a prologue"
            before = "a module before its host work is lowered"
            raise errors.InternalError(what, expected=before)
        self._anchor = anchor
        thread, lane, warp, warpgroup, x, y, z, *rest = self._anchor.operands
        elected, warp_elected, self.smem_base = rest
        self.threads = ThreadIds(
            thread, lane, warp, warpgroup, (x, y, z), elected, warp_elected
        )


def num_pointers(spec: LaunchSpec) -> int:
    """The number of pointers that XLA passes: the buffers, and those of `peers.py`."""
    return spec.num_buffers + (2 if spec.devices > 1 else 0)


def launch_of(module: ir.Module) -> Any:
    """The `gpu.launch` of a module."""
    found = [
        op
        for host in module.body.operations
        if isinstance(host, func.FuncOp) and not host.is_external
        for op in host.entry_block.operations
        if isinstance(op, gpu.LaunchOp)
    ]
    if len(found) != 1:
        raise errors.InternalError(
            "a kernel's module must have one gpu.launch", got=f"{len(found)} of them"
        )
    return found[0]


def register_limit_of(module: ir.Operation) -> ir.IntegerAttr | None:
    """The most registers that a thread of a module's launch may have; None: any."""
    hosts = [
        block
        for op in module.regions[0].blocks[0].operations
        if op.operation.name == "func.func"
        for block in op.operation.regions[0].blocks
    ]
    for op in (op for block in hosts for op in block.operations):
        attributes = op.operation.attributes
        if op.operation.name == "gpu.launch" and _REGISTER_LIMIT in attributes:
            return ir.IntegerAttr(attributes[_REGISTER_LIMIT])
    return None


def verify(module: ir.Module) -> None:
    """Verifies a module.

    Raises:
      CompilationError: the module does not verify.
    """
    with refusals(module):
        module.operation.verify()


@contextlib.contextmanager
def refusals(module: ir.Module) -> Iterator[None]:
    """Converts MLIR's errors about a kernel's module to a CompilationError."""
    try:
        yield
    except ir.MLIRError as error:
        attributes = module.operation.attributes
        name = attributes["sym_name"].value if "sym_name" in attributes else ""
        raise errors.CompilationError(
            f"MLIR rejects the module of kernel {name!r}", got=str(error)
        ) from error


def _smem_base() -> ir.Value:
    space = ir.Attribute.parse("#gpu.address_space<workgroup>")
    i8 = ir.IntegerType.get_signless(8)
    size = [ir.ShapedType.get_dynamic_size()]
    dynamic = ir.MemRefType.get(size, i8, memory_space=space)
    block = gpu.dynamic_shared_memory(dynamic)
    descriptor = ir.Type.parse(
        "!llvm.struct<(ptr<3>, ptr<3>, i64, array<1 x i64>, array<1 x i64>)>"
    )
    unpacked = builtin.unrealized_conversion_cast([descriptor], [block])
    return llvm.extractvalue(pointer_type(3), unpacked, [1])
