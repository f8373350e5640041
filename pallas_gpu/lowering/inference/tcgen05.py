# SPDX-License-Identifier: Apache-2.0
"""What operations on TMEM ask of layouts, a rule per operation: see `constraints`."""

from __future__ import annotations

from collections.abc import Callable

from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.layouts import TmemLayout
from pallas_gpu.layouts.tmem.layout import COLUMN_BITS
from pallas_gpu.lowering.inference import sources
from pallas_gpu.lowering.inference.constraints import array_of, rule, use_as_pointers
from pallas_gpu.lowering.inference.network import Network, Use, Variable
from pallas_gpu.lowering.inference.views import View
from pallas_gpu.mosaic import dialect

_HALF_ROWS, _ROWS = 64, 128


@rule("mosaic_gpu.tmem_alloc", "mosaic_gpu.slice_tmem")
def _array(network: Network, op: ir.Operation, key: int) -> None:
    if op.name == "mosaic_gpu.tmem_alloc":
        use_as_pointers(network, op)  # the place in SMEM that receives the address
    view = network.view(op.results[0])
    assert view is not None
    network.use_memory(Use(op, "alloc", view, network.weight))


@rule("mosaic_gpu.tmem_layout_cast")
def _layout_cast(network: Network, op: ir.Operation, key: int) -> None:
    def wanted() -> TmemLayout:
        return dialect.tmem_from_attribute(op.attributes["new_layout"])

    _demand(network, op, 0, "", wanted)


# --- registers ------------------------------------------------------------------------


@rule("mosaic_gpu.async_load_tmem")
def _load(network: Network, op: ir.Operation, key: int) -> None:
    if "reduce" in op.attributes:
        raise errors.UnsupportedError(
            "Loads from TMEM that also reduce have no layouts yet",
            expected="async_load_tmem without a reduction",
            got=op.attributes["reduce"],
            hint="reduce the loaded array",
            where=sources.where(op),
        )
    use = Use(op, "load", array_of(network, op, 0), network.weight)
    network.use_memory(use)
    variable = network.variable(op, op.results[0].type, key, access=use)
    _note_access(variable, use)
    network.give(op.results[0], variable)


@rule("mosaic_gpu.async_store_tmem")
def _store(network: Network, op: ir.Operation, key: int) -> None:
    use = Use(op, "store", array_of(network, op, 1), network.weight)
    network.use_memory(use)
    variable = network.variable(op, op.operands[0].type, key, access=use)
    _note_access(variable, use)
    network.take(op, 0, variable)


def _note_access(variable: Variable, use: Use) -> None:
    variable.source.loads.add(use.view.bits)
    variable.source.tmem[use.view.base] = None


# --- SMEM -----------------------------------------------------------------------------


@rule(
    "mosaic_gpu.async_store_smem_to_tmem",
    "mosaic_gpu.async_store_scales_smem_to_tmem",
    "mosaic_gpu.async_store_sparse_metadata_smem_to_tmem",
)
def _copy(network: Network, op: ir.Operation, key: int) -> None:
    source, target = array_of(network, op, 0), array_of(network, op, 1)
    match op.name:
        case "mosaic_gpu.async_store_smem_to_tmem":
            # It takes the tiles that a left operand in SMEM has.
            network.use_memory(
                Use(op, "mma", source, network.weight, role="the source")
            )
            _demand(network, op, 1, "", lambda: _packed(target))
            return
        case "mosaic_gpu.async_store_scales_smem_to_tmem":
            wanted = [TmemLayout.scales(), TmemLayout.scales_m64_collective()]
        case _:
            wanted = [TmemLayout.sparse_metadata()]
    network.use_memory(Use(op, "pointer", source, network.weight))
    use = Use(op, "demand", target, network.weight, wanted=tuple(wanted))
    network.use_memory(use)


# --- the tensor core ------------------------------------------------------------------


@rule("mosaic_gpu.tcgen05_mma")
def _mma(network: Network, op: ir.Operation, key: int) -> None:
    # accumulator, a, b, accumulate, a_scale, b_scale, a_sparse_metadata
    counts = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
    first = [sum(counts[:i]) if n else None for i, n in enumerate(counts)]
    collective = ir.BoolAttr(op.attributes["collective"]).value
    accumulator, left = array_of(network, op, 0), array_of(network, op, 1)
    half = accumulator.sizes[0] == _HALF_ROWS
    _demand(
        network, op, 0, "accumulator", lambda: _accumulator(accumulator, collective)
    )
    if left.in_tmem:
        _check_left(op, left)
        _demand(network, op, 1, "left operand", lambda: _packed(left))
    else:
        use = Use(op, "mma", left, network.weight, role="left operand")
        network.use_memory(use)
    right = array_of(network, op, 2)
    network.use_memory(Use(op, "mma", right, network.weight, role="right operand"))
    both = TmemLayout.scales_m64_collective if collective and half else None
    made = (
        ("scales of the left operand", TmemLayout.scales),
        ("scales of the right operand", both or TmemLayout.scales),
        ("metadata", TmemLayout.sparse_metadata),
    )
    for i, (role, make) in zip(first[4:], made, strict=True):
        if i is not None:
            _demand(network, op, i, role, make)


def _accumulator(view: View, collective: bool) -> TmemLayout:
    """One element to a column; 64 rows lie as one or as two CTAs write them."""
    if view.sizes[0] != _HALF_ROWS:
        return TmemLayout.default()
    if collective:
        return TmemLayout.m64_collective(view.sizes[1])
    return TmemLayout.half_lane(view.sizes[1])


def _packed(view: View) -> TmemLayout:
    """Columns full of elements, as operands have them."""
    return TmemLayout.default(COLUMN_BITS // view.bits)


def _check_left(op: ir.Operation, view: View) -> None:
    if view.sizes[0] != _ROWS:
        raise errors.UnsupportedError(
            f"tcgen05_mma takes no left operand of {view.sizes[0]} rows from TMEM",
            expected=f"{_ROWS} rows",
            got=f"shape {view.view_shape}",
            hint="pass the left operand in SMEM",
            where=sources.where(op),
        )


def _demand(
    network: Network,
    op: ir.Operation,
    i: int,
    role: str,
    make: Callable[[], TmemLayout],
) -> None:
    """Operand `i` lies in TMEM in the layout that `make` gives, or in none."""
    try:
        wanted = make()
    except errors.LayoutError as error:
        where = sources.where(op)
        name = f"{role} of {sources.words(op)}" if role else sources.words(op)
        raise errors.LayoutError(
            f"{name}: {error.what}",
            expected=error.expected,
            got=error.got,
            hint=error.hint,
            where=where,
        ) from None
    view = array_of(network, op, i)
    use = Use(op, "demand", view, network.weight, role=role, wanted=(wanted,))
    network.use_memory(use)
