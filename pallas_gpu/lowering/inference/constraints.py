# SPDX-License-Identifier: Apache-2.0
"""What each operation of the warpgroup level asks of layouts: a rule per operation.

A rule adds the operation's variables to the network and says which operands they take
and which results they give. Operations without vectors and arrays pass unseen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.layouts import Layout, WGSplatLayout
from pallas_gpu.layouts.registers.linear import THREADS
from pallas_gpu.lowering.inference import relations, sources
from pallas_gpu.lowering.inference.network import Network, Use, Variable
from pallas_gpu.lowering.inference.views import View
from pallas_gpu.mosaic import dialect, logical
from pallas_gpu.mosaic.elements import scalars
from pallas_gpu.mosaic.registers import place
from pallas_gpu.primitives import _registry as registry

# A loop counts as this many runs of its body if it has more, or nobody knows; loops
# inside of each other as the product, up to a limit that keeps sums of costs small.
MAX_TRIPS = 8
_MAX_WEIGHT = MAX_TRIPS**4

Rule = Callable[[Network, ir.Operation, int], None]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Returns a decorator that enters the infer rule of some operations."""

    def enter(function: Rule) -> Rule:
        for name in names:
            registry.register(name, registry.RuleKind.INFER)(function)
        return function

    return enter


def collect(block: ir.Block, cluster: Sequence[int] = ()) -> Network:
    """Collects a kernel's body.

    Args:
      block: the body.
      cluster: CTAs of a cluster per axis.

    Raises:
      LayoutError: a layout that an operation demands does not fit its array.
    """
    network = Network(tuple(cluster))
    collect_block(network, block)
    _pass_on_flight(network)
    return network


def _pass_on_flight(network: Network) -> None:
    """No relayout stands where loops and branches may pass an accumulator in flight."""
    spread = True
    while spread:
        spread = False
        for edge in network.edges:
            maker, taker = edge.maker.variable, edge.taker.variable
            passes_on = taker.op.name.startswith("scf.")
            if maker.in_flight and passes_on and not taker.in_flight:
                taker.in_flight = spread = True
    network.edges = [
        dataclasses.replace(edge, rigid=edge.rigid or edge.maker.variable.in_flight)
        for edge in network.edges
    ]


def collect_block(network: Network, block: ir.Block) -> None:
    """Collects the operations of a block in order."""
    rules = registry.rules(registry.RuleKind.INFER)
    for view in block.operations:
        op = view.operation
        if op.name.startswith(logical.SCALAR):
            continue
        key = network.key_of(op)
        rules.get(op.name, _without_arrays)(network, op, key)


def is_vector(value: ir.Value) -> bool:
    """Whether a value is an array in registers."""
    return isinstance(value.type, ir.VectorType)


def vector_operands(op: ir.Operation) -> list[int]:
    """Positions of the operands that are arrays in registers."""
    return [i for i, x in enumerate(op.operands) if is_vector(x)]


def is_array(value: ir.Value) -> bool:
    """Whether a value is an array in registers or in memory."""
    return isinstance(value.type, ir.VectorType | ir.MemRefType)


def _without_arrays(network: Network, op: ir.Operation, key: int) -> None:
    """An operation without a rule: scalar code, a branch without results."""
    if any(map(is_array, (*op.operands, *op.results))):
        raise _no_rule(op)
    for region in op.regions:
        for block in region.blocks:
            network.name_arguments(block, key)
            collect_block(network, block)


def _no_rule(op: ir.Operation) -> errors.InternalError:
    return errors.InternalError(
        f"Layout inference has no rule for {op.name}",
        got=str(op)[:200],
        where=sources.where(op),
    )


def use_as_pointers(network: Network, op: ir.Operation) -> None:
    """An operation that takes the addresses of arrays in memory."""
    for operand in op.operands:
        if isinstance(operand.type, ir.MemRefType):
            view = network.view(operand)
            if view is not None:
                use = Use(op, "pointer", view, network.weight)
                network.use_memory(use)


# --- elementwise, splats --------------------------------------------------------------


def elementwise(network: Network, op: ir.Operation, key: int) -> None:
    """All arrays of an elementwise operation have one layout."""
    positions = vector_operands(op)
    (result,) = op.results
    if not is_vector(result):
        return
    if all(op.operands[i] in network.deferred for i in positions):
        network.defer(result, "made")
        return
    variable = network.variable(op, result.type, key, computes=True)
    for i in positions:
        network.take(op, i, variable)
    network.give(result, variable)


@rule("vector.broadcast")
def _splat(network: Network, op: ir.Operation, key: int) -> None:
    if vector_operands(op):
        raise _no_rule(op)
    network.defer(op.results[0], "splat")


@rule("mosaic_gpu.broadcasted_iota")
def _iota(network: Network, op: ir.Operation, key: int) -> None:
    network.defer(op.results[0], "made")


@rule("mosaic_gpu.optimization_barrier")
def _barrier(network: Network, op: ir.Operation, key: int) -> None:
    for i, result in enumerate(op.results):
        if is_vector(result):
            variable = network.variable(op, result.type, key, role=f"operand {i}")
            # What settles an accumulator reads it before a relayout could.
            network.take(op, i, variable, rigid=True)
            network.give(result, variable)


@rule("mosaic_gpu.layout_cast")
def _layout_cast(network: Network, op: ir.Operation, key: int) -> None:
    operand, result = op.operands[0], op.results[0]
    shape, _ = network.vector_type(result.type)
    layout = dialect.from_attribute(op.attributes["new_layout"])
    if isinstance(layout, WGSplatLayout) and network.deferred.get(operand) == "splat":
        network.defer(result, "splat")
        return
    try:
        placement = place(layout, shape)
    except errors.LayoutError as error:
        raise errors.LayoutError(
            f"layout_cast: an array of shape {shape} has no such layout",
            expected=error.expected,
            got=error.got,
            hint=f"{error.what}: cast to a layout that fits the shape, or leave the "
            "layout_cast out",
            where=sources.where(op),
        ) from None
    if isinstance(placement, WGSplatLayout):
        made_by = operand.owner
        maker = sources.named(made_by.operation) if _is_op(made_by) else "a loop"
        raise errors.LayoutError(
            "layout_cast to WG_SPLAT: the elements of the array may differ",
            expected="a splat: a scalar broadcast to a shape",
            got=f"an array of shape {shape} from {maker}",
            hint="leave the layout_cast out: splats take every layout by themselves",
            where=sources.where(op),
        )
    variable = network.variable(op, result.type, key, fixed=placement)
    network.take(op, 0, variable)
    network.give(result, variable)


def _is_op(owner: object) -> bool:
    return not isinstance(owner, ir.Block)


# --- operations that change the shape -------------------------------------------------


def _related(
    network: Network, op: ir.Operation, key: int, relation: relations.Relation
) -> None:
    """An operation on one array whose operand's layout gives the result's."""
    result = op.results[0]
    if network.deferred.get(op.operands[0]) == "splat":
        network.defer(result, "splat")
        return
    shape, _ = network.vector_type(result.type)
    variable = network.variable(
        op, op.operands[0].type, key, result=shape, relation=relation
    )
    network.take(op, 0, variable)
    network.give(result, variable)


@rule("mosaic_gpu.broadcast_in_dim")
def _broadcast(network: Network, op: ir.Operation, key: int) -> None:
    old, _ = network.vector_type(op.operands[0].type)
    new, _ = network.vector_type(op.results[0].type)
    if op.operands[0] in network.deferred:
        network.defer(op.results[0], network.deferred[op.operands[0]])
        return
    dims = tuple(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
    if math.prod(old) == math.prod(new):
        _related(network, op, key, relations.Reshape(old, new))
    else:
        _related(network, op, key, relations.Broadcast(old, new, dims))


@rule("vector.shape_cast")
def _reshape(network: Network, op: ir.Operation, key: int) -> None:
    old, _ = network.vector_type(op.operands[0].type)
    new, _ = network.vector_type(op.results[0].type)
    _related(network, op, key, relations.Reshape(old, new))


@rule("vector.transpose")
def _transpose(network: Network, op: ir.Operation, key: int) -> None:
    permutation = tuple(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
    _related(network, op, key, relations.Transpose(permutation))
    for value in (op.operands[0], op.results[0]):
        if value in network.results:
            network.results[value].cell.transposed = True


@rule("vector.extract_strided_slice")
def _slice(network: Network, op: ir.Operation, key: int) -> None:
    shape, _ = network.vector_type(op.operands[0].type)
    starts, sizes = (_integers(op.attributes[n]) for n in ("offsets", "sizes"))
    # Trailing axes that the attributes leave out are taken whole.
    starts += (0,) * (len(shape) - len(starts))
    sizes += shape[len(sizes) :]
    _related(network, op, key, relations.Slice(shape, starts, sizes))


@rule("vector.insert_strided_slice")
def _update(network: Network, op: ir.Operation, key: int) -> None:
    """A part replaces registers of the whole, which so keeps its layout."""
    sizes, _ = network.vector_type(op.operands[0].type)
    shape, _ = network.vector_type(op.operands[1].type)
    starts = _integers(op.attributes["offsets"])
    part = network.results.get(op.operands[0])
    variable = network.variable(
        op,
        op.operands[1].type,
        key,
        result=sizes,
        relation=relations.Slice(shape, starts, sizes),
        in_flight=part is not None and part.variable.in_flight,
    )
    network.take(op, 0, variable, "target")
    network.take(op, 1, variable)
    network.give(op.results[0], variable, "source")


def _integers(attribute: ir.Attribute) -> tuple[int, ...]:
    return tuple(ir.IntegerAttr(x).value for x in ir.ArrayAttr(attribute))


@rule("vector.multi_reduction")
def _reduction(network: Network, op: ir.Operation, key: int) -> None:
    axes = tuple(ir.DenseI64ArrayAttr(op.attributes["reduction_dims"]))
    operand, result = op.operands[0], op.results[0]
    shape = network.vector_type(result.type)[0] if is_vector(result) else ()
    variable = network.variable(
        op, operand.type, key, result=shape, relation=relations.Reduce(axes)
    )
    network.take(op, 0, variable)
    if is_vector(result):
        network.give(result, variable)


# --- memory ---------------------------------------------------------------------------


def array_of(network: Network, op: ir.Operation, i: int) -> View:
    view = network.view(op.operands[i])
    if view is None:
        raise errors.InternalError(
            "A memref that is neither an SMEM array nor a kernel's buffer",
            got=str(op.operands[i]),
            where=sources.where(op),
        )
    return view


@rule("mosaic_gpu.vector_load")
def _load(network: Network, op: ir.Operation, key: int) -> None:
    use = _access(network, op, 0)
    variable = network.variable(op, op.results[0].type, key, access=use)
    _note_access(variable, use)
    network.give(op.results[0], variable)


@rule("mosaic_gpu.vector_store")
def _store(network: Network, op: ir.Operation, key: int) -> None:
    use = _access(network, op, 1)
    variable = network.variable(op, op.operands[0].type, key, access=use)
    _note_access(variable, use)
    network.take(op, 0, variable)


def _access(network: Network, op: ir.Operation, i: int) -> Use:
    view = array_of(network, op, i)
    optimized = math.prod(view.sizes) % THREADS == 0
    if "optimized" in op.attributes:
        optimized &= ir.BoolAttr(op.attributes["optimized"]).value
    use = Use(op, "store" if i else "load", view, network.weight, optimized)
    network.use_memory(use)
    return use


def _note_access(variable: Variable, use: Use) -> None:
    cell = variable.source
    cell.loads.add(use.view.bits)
    cell.in_smem |= use.view.in_smem
    cell.in_gmem |= not use.view.in_smem
    cell.transposed |= use.view.is_transposed


@rule("memref.load", "memref.store")
def _element(network: Network, op: ir.Operation, key: int) -> None:
    i = 0 if op.name == "memref.load" else 1
    view = network.view(op.operands[i])
    if view is not None:
        use = Use(op, "store" if i else "load", view, network.weight)
        network.use_memory(use)


@rule("mosaic_gpu.async_load", "mosaic_gpu.async_store")
def _copy(network: Network, op: ir.Operation, key: int) -> None:
    from_gmem = op.name == "mosaic_gpu.async_load"
    gmem = array_of(network, op, 0 if from_gmem else 1)
    smem = array_of(network, op, 1 if from_gmem else 0)
    segments = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
    # Both have the two memrefs first; a load's barrier, which may be missing, is next.
    first = sum(segments[: 3 if from_gmem else 2])
    count = segments[3 if from_gmem else 2]
    indices = [op.operands[first + i] for i in range(count)]
    lengths = list(ir.DenseI64ArrayAttr(op.attributes["slice_lengths"]))
    pieces = 1
    if from_gmem and network.cluster:
        axes = ir.ArrayAttr(op.attributes["collective"])
        pieces = math.prod(network.cluster[ir.IntegerAttr(a).value] for a in axes)
    part = gmem.moved(indices, lengths)
    use = Use(op, "copy", smem, network.weight, other=part, pieces=pieces)
    network.use_memory(use)


@rule("mosaic_gpu.slice_smem")
def _smem_array(network: Network, op: ir.Operation, key: int) -> None:
    view = network.view(op.results[0])
    if view is not None:
        network.array(view)


@rule(
    "mosaic_gpu.with_transforms",
    "memref.subview",
    "memref.transpose",
    "builtin.unrealized_conversion_cast",
)
def _view(network: Network, op: ir.Operation, key: int) -> None:
    """Parts are resolved where they are used; a cast of an array gives its pointer."""
    if op.name == "builtin.unrealized_conversion_cast":
        use_as_pointers(network, op)


# --- the tensor core ------------------------------------------------------------------


def _wgmma_layout(network: Network, op: ir.Operation, i: int, layout: Layout):
    """The only layout that wgmma takes an operand in."""
    shape, _ = network.vector_type(op.operands[i].type)
    try:
        return place(layout, shape)
    except errors.LayoutError as error:
        what = "accumulator" if i == 0 else "left operand"
        raise errors.LayoutError(
            f"wgmma: its {what} has no Layout.{layout.name}",
            expected=error.expected,
            got=f"shape {shape}",
            hint="pad the array to whole tiles",
            where=sources.where(op),
        ) from None


@rule("mosaic_gpu.wgmma")
def _wgmma(network: Network, op: ir.Operation, key: int) -> None:
    network.uses_wgmma = True
    layout = _wgmma_layout(network, op, 0, Layout.WGMMA)
    accumulator = network.variable(
        op,
        op.operands[0].type,
        key,
        role="accumulator",
        fixed=layout,
        in_flight=True,
    )
    network.take(op, 0, accumulator)
    network.give(op.results[0], accumulator)
    if is_vector(op.operands[1]):
        _, bits = network.vector_type(op.operands[1].type)
        name = Layout.WGMMA if bits == 16 else Layout.WGMMA_8BIT
        left = _wgmma_layout(network, op, 1, name)
        variable = network.variable(
            op, op.operands[1].type, key, role="left operand", fixed=left
        )
        network.take(op, 1, variable)
    else:
        view = array_of(network, op, 1)
        network.use_memory(Use(op, "a", view, network.weight))
    view = array_of(network, op, 2)
    network.use_memory(Use(op, "b", view, network.weight))


# --- control --------------------------------------------------------------------------


def _terminator(block: ir.Block) -> ir.Operation:
    return block.operations[len(block.operations) - 1].operation


@rule("scf.yield", "scf.condition")
def _end(network: Network, op: ir.Operation, key: int) -> None:
    """The operation around has rules for what its regions yield."""


def _in_loop(network: Network, block: ir.Block, key: int, trips: int) -> None:
    network.name_arguments(block, key)
    before = network.weight
    network.weight = _inside(before, trips)
    collect_block(network, block)
    network.weight = before


def _inside(weight: int, trips: int) -> int:
    return min(weight * min(max(trips, 1), MAX_TRIPS), _MAX_WEIGHT)


def _take_yields(
    network: Network, end: ir.Operation, carries: dict[int, Variable], trips: int
) -> None:
    """What a loop's body yields arrives in the carries' layouts, once each run."""
    before = network.weight
    network.weight = _inside(before, trips)
    for i, variable in carries.items():
        network.take(end, i, variable)
    network.weight = before


@rule("scf.for")
def _for(network: Network, op: ir.Operation, key: int) -> None:
    block = op.regions[0].blocks[0]
    low, high, step = (scalars.known(op.operands[i]) for i in range(3))
    trips = MAX_TRIPS
    if low is not None and high is not None and step is not None:
        trips = -((low - high) // step)
    carries: dict[int, Variable] = {}
    for i, result in enumerate(op.results):
        if is_vector(result):
            variable = network.variable(op, result.type, key, role=f"carry {i}")
            network.take(op, 3 + i, variable)
            network.give(block.arguments[1 + i], variable)
            network.give(result, variable)
            carries[i] = variable
    _in_loop(network, block, key, trips)
    _take_yields(network, _terminator(block), carries, trips)


@rule("scf.while")
def _while(network: Network, op: ir.Operation, key: int) -> None:
    test, body = (region.blocks[0] for region in op.regions)
    carries: dict[int, Variable] = {}
    for i, argument in enumerate(test.arguments):
        if is_vector(argument):
            variable = network.variable(op, argument.type, key, role=f"carry {i}")
            network.take(op, i, variable)
            network.give(argument, variable)
            carries[i] = variable
    passed: dict[int, Variable] = {}
    for i, result in enumerate(op.results):
        if is_vector(result):
            variable = network.variable(op, result.type, key, role=f"result {i}")
            network.give(body.arguments[i], variable)
            network.give(result, variable)
            passed[1 + i] = variable
    _in_loop(network, test, key, MAX_TRIPS)
    _take_yields(network, _terminator(test), passed, MAX_TRIPS)
    _in_loop(network, body, key, MAX_TRIPS)
    _take_yields(network, _terminator(body), carries, MAX_TRIPS)


@rule("scf.if")
def _branch(network: Network, op: ir.Operation, key: int) -> None:
    chosen = {
        i: network.variable(op, result.type, key, role=f"result {i}")
        for i, result in enumerate(op.results)
        if is_vector(result)
    }
    for region in op.regions:
        for block in region.blocks:
            network.name_arguments(block, key)
            collect_block(network, block)
            _take_yields(network, _terminator(block), chosen, 1)
    for i, variable in chosen.items():
        network.give(op.results[i], variable)
