# SPDX-License-Identifier: Apache-2.0
"""Bodies of the warpgroup level, written by hand: one method per operation.

Every operation gets a line of its own in `kernel.py`, unless a test names one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, builtin, func, scf, vector

from pallas_gpu.layouts import to_layout
from pallas_gpu.layouts.window import Window
from pallas_gpu.lowering import inference, memrefs
from pallas_gpu.mosaic import dialect, module
from pallas_gpu.mosaic.elements import scalars

SMEM = "#gpu.address_space<workgroup>"


def operations(block: ir.Block) -> Iterator[ir.Operation]:
    """The operations of a block and of those in it, in their order."""
    for view in block.operations:
        yield view.operation
        for region in view.operation.regions:
            for inner in region.blocks:
                yield from operations(inner)


class Body:
    """A function's block under construction; `line` counts its operations."""

    def __init__(self) -> None:
        self.context = module.make_context()
        self.context.allow_unregistered_dialects = True
        self.line = 0
        self._buffers = 0
        self._smem = 0
        with self.context, ir.Location.unknown():
            self.module = ir.Module.create()
            types = [self.type(t) for t in ("!llvm.ptr", "index", "f32", "i32", "i1")]
            with ir.InsertionPoint(self.module.body):
                function = func.FuncOp("kernel", (types, []))
            self.block = function.add_entry_block()
        names = ("pointer", "index", "scalar", "i32", "condition")
        self.arguments = dict(zip(names, self.block.arguments, strict=True))

    @contextlib.contextmanager
    def building(self, *, verify: bool = True) -> Iterator[Body]:
        with self.context, ir.Location.unknown(), ir.InsertionPoint(self.block):
            yield self
            func.ReturnOp([])
        if verify:
            assert self.module.operation.verify()

    @contextlib.contextmanager
    def at(self, line: int | None = None) -> Iterator[None]:
        self.line = self.line + 1 if line is None else line
        with ir.Location.file("kernel.py", self.line, 0):
            yield

    def type(self, text: str) -> ir.Type:
        with self.context:
            return ir.Type.parse(text)

    def vector_type(self, shape: Sequence[int], element: str) -> ir.Type:
        return ir.VectorType.get(list(shape), self.type(element))

    def infer(self, *scratch_bytes: int, **kw) -> inference.Assignment:
        with self.context:
            sizes = scratch_bytes or (8192,)
            return inference.infer(self.block, scratch_bytes=sizes, **kw)

    # --- memory -----------------------------------------------------------------------

    def gmem(self, shape: Sequence[int], element: str = "f32") -> ir.Value:
        sizes = "x".join(map(str, shape))
        type_ = self.type(f"memref<{sizes}x{element}>")
        cast = builtin.UnrealizedConversionCastOp([type_], [self.arguments["pointer"]])
        index = ir.IntegerAttr.get(self.type("i32"), self._buffers)
        cast.operation.attributes["pallas_gpu.buffer"] = index
        self._buffers += 1
        return cast.results[0]

    def smem(
        self,
        shape: Sequence[int],
        element: str = "f32",
        transforms: tuple[tuple[int, ...] | None, int] | None = None,
    ) -> ir.Value:
        sizes = "x".join(map(str, shape))
        with self.at():
            type_ = self.type(f"memref<{sizes}x{element}, {SMEM}>")
            array = dialect.ops.slice_smem(type_, self._smem)
            self._smem += 1024
            if transforms is None:
                return array
            given = dialect.transforms_to_attributes(*transforms)
            return dialect.ops.with_transforms(array, ir.ArrayAttr.get(given))

    def reuse_smem(self) -> None:
        """The next array starts where the first one does."""
        self._smem = 0

    def pointer(self, array: ir.Value) -> ir.Operation:
        """The address of an array."""
        with self.at():
            address = self.type("!llvm.ptr")
            return builtin.UnrealizedConversionCastOp([address], [array]).operation

    def part(
        self,
        array: ir.Value,
        starts: Sequence[int | ir.Value],
        sizes: Sequence[int | None],
        permutation: Sequence[int] | None = None,
    ) -> ir.Value:
        window = Window.whole(array.type.shape).slice(
            [s if isinstance(s, int) else self._i32(s) for s in starts],
            sizes,
            [scalars.divisor(s) for s in starts],
        )
        if permutation is not None:
            window = window.transpose(permutation)
        return memrefs.subview(array, window)

    def _i32(self, start: ir.Value) -> ir.Value:
        return arith.index_cast(self.type("i32"), start)

    def transposed(self, array: ir.Value, permutation: Sequence[int]) -> ir.Value:
        return memrefs.transposed(array, permutation)

    def load(self, array: ir.Value, **kw) -> ir.Value:
        with self.at():
            return dialect.ops.vector_load(array, **kw)

    def store(self, value: ir.Value, array: ir.Value) -> ir.Operation:
        with self.at():
            return dialect.ops.vector_store(value, array).operation

    def copy_in(
        self, gmem: ir.Value, smem: ir.Value, collective: Sequence[int] = ()
    ) -> ir.Operation:
        i32 = self.type("i32")
        with self.at():
            pointer = self.type(f"memref<!mosaic_gpu.barrier, {SMEM}>")
            barrier = builtin.UnrealizedConversionCastOp(
                [pointer], [self.arguments["pointer"]]
            )
            shape = list(ir.MemRefType(gmem.type).shape)
            zeros = [arith.constant(i32, 0)] * len(shape)
            axes = ir.ArrayAttr.get([ir.IntegerAttr.get(i32, a) for a in collective])
            return dialect.ops.async_load(
                gmem, smem, zeros, shape, axes, barrier=barrier.results[0]
            ).operation

    def copy_out(self, smem: ir.Value, gmem: ir.Value) -> ir.Operation:
        with self.at():
            shape = list(ir.MemRefType(gmem.type).shape)
            zeros = [arith.constant(self.type("i32"), 0)] * len(shape)
            return dialect.ops.async_store(smem, gmem, zeros, shape).operation

    # --- vectors ----------------------------------------------------------------------

    def splat(self, shape: Sequence[int], element: str = "f32") -> ir.Value:
        with self.at():
            scalar = self.arguments["scalar"]
            if element != "f32":
                scalar = arith.truncf(self.type(element), scalar)
            return vector.broadcast(self.vector_type(shape, element), scalar)

    def iota(self, shape: Sequence[int], dimension: int) -> ir.Value:
        with self.at():
            return dialect.ops.broadcasted_iota(
                self.vector_type(shape, "i32"), dimension
            )

    def op(self, name: str, *operands: ir.Value, element: str | None = None):
        first = next(x for x in operands if isinstance(x.type, ir.VectorType))
        type_ = first.type
        if element is not None:
            type_ = self.vector_type(ir.VectorType(type_).shape, element)
        with self.at():
            return ir.Operation.create(
                f"pallas_gpu.{name}", [type_], list(operands)
            ).result

    def cast(self, value: ir.Value, layout) -> ir.Value:
        with self.at():
            attribute = dialect.to_attribute(to_layout(layout))
            return dialect.ops.layout_cast(value, attribute)

    def reduce(self, value: ir.Value, axes: Sequence[int], kind: str = "add"):
        vector_ = ir.VectorType(value.type)
        rest = [n for a, n in enumerate(vector_.shape) if a not in axes]
        with self.at():
            start = self.arguments["scalar"]
            if rest:
                type_ = ir.VectorType.get(rest, vector_.element_type)
                start = vector.broadcast(type_, start)
            attribute = ir.Attribute.parse(f"#vector.kind<{kind}>")
            return vector.multi_reduction(attribute, value, start, list(axes))

    def broadcast(self, value: ir.Value, shape: Sequence[int], dims: Sequence[int]):
        element = ir.VectorType(value.type).element_type
        with self.at():
            return dialect.ops.broadcast_in_dim(
                ir.VectorType.get(list(shape), element), value, list(dims)
            )

    def reshape(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        element = ir.VectorType(value.type).element_type
        with self.at():
            return vector.shape_cast(ir.VectorType.get(list(shape), element), value)

    def transpose(self, value: ir.Value, permutation: Sequence[int]) -> ir.Value:
        type_ = ir.VectorType(value.type)
        shape = [type_.shape[p] for p in permutation]
        with self.at():
            result = ir.VectorType.get(shape, type_.element_type)
            return vector.transpose(result, value, list(permutation))

    def slice(self, value: ir.Value, starts: Sequence[int], sizes: Sequence[int]):
        element = ir.VectorType(value.type).element_type
        with self.at():
            return vector.extract_strided_slice(
                ir.VectorType.get(list(sizes), element),
                value,
                list(starts),
                list(sizes),
                [1] * len(sizes),
            )

    def update(self, whole: ir.Value, part: ir.Value, starts: Sequence[int]):
        with self.at():
            return vector.insert_strided_slice(
                part, whole, list(starts), [1] * len(starts)
            )

    def wgmma(self, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        with self.at():
            return dialect.ops.wgmma(acc, a, b)

    def barrier(self, value: ir.Value) -> ir.Value:
        with self.at():
            return dialect.ops.optimization_barrier([value])

    # --- control ----------------------------------------------------------------------

    def loop(
        self,
        inits: Sequence[ir.Value],
        body: Callable[..., Sequence[ir.Value]],
        trips: int | None = 16,
    ) -> list[ir.Value]:
        index = ir.IndexType.get()
        low, step = arith.constant(index, 0), arith.constant(index, 1)
        high = self.arguments["index"]
        if trips is not None:
            high = arith.constant(index, trips)
        with self.at():
            loop = scf.ForOp(low, high, step, list(inits))
        with ir.InsertionPoint(loop.body):
            results = body(loop.induction_variable, *loop.inner_iter_args)
            scf.yield_(list(results))
        return list(loop.results)

    def while_loop(
        self, inits: Sequence[ir.Value], body: Callable[..., Sequence[ir.Value]]
    ) -> list[ir.Value]:
        types = [x.type for x in inits]
        with self.at():
            loop = scf.WhileOp(types, list(inits))
        before, after = (r.blocks.append(*types) for r in (loop.before, loop.after))
        with ir.InsertionPoint(before):
            scf.condition(self.arguments["condition"], list(before.arguments))
        with ir.InsertionPoint(after):
            scf.yield_(list(body(*after.arguments)))
        return list(loop.results)

    def branch(
        self,
        then: Callable[[], Sequence[ir.Value]],
        other: Callable[[], Sequence[ir.Value]],
        types: Sequence[ir.Type],
    ) -> list[ir.Value]:
        with self.at():
            branch = scf.IfOp(self.arguments["condition"], list(types), has_else=True)
        for block, make in ((branch.then_block, then), (branch.else_block, other)):
            with ir.InsertionPoint(block):
                scf.yield_(list(make()))
        return list(branch.results)


def large_body(count: int, seed: int = 0) -> Body:
    """A body of about `count` operations on vectors, of which values live side by side.

    Most are elementwise and have two operands; loads, stores, reductions and broadcasts
    lie between them, and a product asks for the tensor core's layout.
    """
    shape, reach = (128, 128), 8  # operands lie at most `reach` values back
    rng = random.Random(seed)
    body = Body()
    with body.building() as b:
        source, target = b.gmem(shape), b.gmem(shape)
        left, right = b.smem((128, 64), "f16"), b.smem((64, 128), "f16")
        live = [b.load(source), b.barrier(b.wgmma(b.splat(shape), left, right))]
        for _ in range(count):
            kind = rng.random()
            if kind < 0.02:
                live.append(b.load(source))
            elif kind < 0.04:
                b.store(rng.choice(live[-reach:]), target)
            elif kind < 0.06:
                row = b.reduce(rng.choice(live[-reach:]), [1])
                live.append(b.broadcast(row, shape, [0]))
            else:
                operands = [rng.choice(live[-reach:]) for _ in range(2)]
                live.append(b.op("add", *operands))
        b.store(live[-1], target)
    return body
