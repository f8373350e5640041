# SPDX-License-Identifier: Apache-2.0
"""Arrays in TMEM: allocation, loads, stores, copies from SMEM. Infer rules only."""

from __future__ import annotations

from collections.abc import Callable

from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.layouts import TmemLayout
from pallas_gpu.layouts.tmem.layout import COLUMN_BITS
from pallas_gpu.lowering.inference import sources
from pallas_gpu.lowering.inference.constraints import array_of, use_as_pointers
from pallas_gpu.lowering.inference.network import Network, Use, Variable
from pallas_gpu.lowering.memrefs import Part
from pallas_gpu.lowering.rules import infers
from pallas_gpu.mosaic import dialect


@infers("mosaic_gpu.tmem_alloc", "mosaic_gpu.slice_tmem")
def _infer_array(network: Network, op: ir.Operation, key: int) -> None:
    if op.name == "mosaic_gpu.tmem_alloc":
        use_as_pointers(network, op)  # the SMEM word that receives the address
    part = network.part(op.results[0])
    assert part is not None
    network.use_memory(Use(op, "alloc", part, network.weight))


@infers("mosaic_gpu.tmem_layout_cast")
def _infer_layout_cast(network: Network, op: ir.Operation, key: int) -> None:
    def admitted() -> TmemLayout:
        return dialect.tmem_from_attribute(op.attributes["new_layout"])

    require(network, op, 0, "", admitted)


@infers("mosaic_gpu.async_load_tmem")
def _infer_load(network: Network, op: ir.Operation, key: int) -> None:
    if "reduce" in op.attributes:
        raise errors.UnsupportedError(
            "Loads from TMEM with a reduction are not supported",
            expected="async_load_tmem without a reduction",
            got=op.attributes["reduce"],
            hint="reduce the loaded array",
            where=sources.where(op),
        )
    use = Use(op, "load", array_of(network, op, 0), network.weight)
    network.use_memory(use)
    variable = network.variable(op, op.results[0].type, key, access=use)
    _note_access(variable, use)
    network.produce(op.results[0], variable)


@infers("mosaic_gpu.async_store_tmem")
def _infer_store(network: Network, op: ir.Operation, key: int) -> None:
    use = Use(op, "store", array_of(network, op, 1), network.weight)
    network.use_memory(use)
    variable = network.variable(op, op.operands[0].type, key, access=use)
    _note_access(variable, use)
    network.consume(op, 0, variable)


def _note_access(variable: Variable, use: Use) -> None:
    variable.source.loads.add(use.part.bits)
    variable.source.tmem[use.part.base] = None


@infers(
    "mosaic_gpu.async_store_smem_to_tmem",
    "mosaic_gpu.async_store_scales_smem_to_tmem",
    "mosaic_gpu.async_store_sparse_metadata_smem_to_tmem",
)
def _infer_copy(network: Network, op: ir.Operation, key: int) -> None:
    source, target = array_of(network, op, 0), array_of(network, op, 1)
    match op.name:
        case "mosaic_gpu.async_store_smem_to_tmem":
            # It reads the tiles of a left operand in SMEM.
            network.use_memory(
                Use(op, "mma", source, network.weight, role="the source")
            )
            require(network, op, 1, "", lambda: packed(target))
            return
        case "mosaic_gpu.async_store_scales_smem_to_tmem":
            admitted = [TmemLayout.scales(), TmemLayout.scales_m64_collective()]
        case _:
            admitted = [TmemLayout.sparse_metadata()]
    network.use_memory(Use(op, "pointer", source, network.weight))
    use = Use(op, "constrain", target, network.weight, admitted=tuple(admitted))
    network.use_memory(use)


def packed(part: Part) -> TmemLayout:
    """Columns packed with elements, as in operands."""
    return TmemLayout.default(COLUMN_BITS // part.bits)


def require(
    network: Network,
    op: ir.Operation,
    i: int,
    role: str,
    make: Callable[[], TmemLayout],
) -> None:
    """Constrains operand `i`, an array in TMEM, to the layout that `make` returns."""
    try:
        admitted = make()
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
    use = Use(op, "constrain", view, network.weight, role=role, admitted=(admitted,))
    network.use_memory(use)
