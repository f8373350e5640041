# SPDX-License-Identifier: Apache-2.0
"""Collects the layout constraints of a kernel's operations, by one rule for each.

A rule adds the operation's variables to the network and declares which operands they
consume and which results they produce. Scalar code needs no rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.lowering.inference import sources
from pallas_gpu.lowering.inference.network import Key, Network, Use
from pallas_gpu.lowering.memrefs import Part
from pallas_gpu.mosaic import logical
from pallas_gpu.primitives import _registry as registry


def collect(block: ir.Block, cluster: Sequence[int] = ()) -> Network:
    """Collects a kernel's body.

    Args:
      block: the body.
      cluster: CTAs of a cluster per axis.

    Raises:
      LayoutError: a layout that an operation requires does not fit its array.
    """
    network = Network(tuple(cluster))
    collect_block(network, block)
    _propagate_in_flight(network)
    return network


def _propagate_in_flight(network: Network) -> None:
    """Forbids relayouts where loops and branches may pass an accumulator in flight."""
    changed = True
    while changed:
        changed = False
        for edge in network.edges:
            producer, consumer = edge.producer.variable, edge.consumer.variable
            passes_on = consumer.op.name.startswith("scf.")
            if producer.in_flight and passes_on and not consumer.in_flight:
                consumer.in_flight = changed = True
    network.edges = [
        dataclasses.replace(edge, rigid=True)
        if edge.producer.variable.in_flight and not edge.rigid
        else edge
        for edge in network.edges
    ]


def collect_block(network: Network, block: ir.Block) -> None:
    """Collects the operations of a block in order."""
    rules = registry.rules(registry.RuleKind.INFER)
    for view in block.operations:
        op = view.operation
        name = op.name
        if name.startswith(logical.SCALAR):
            continue
        outer = network.in_warp
        network.in_warp = outer or logical.IN_WARP in op.attributes
        rules.get(name, _without_arrays)(network, op, Key(network, op))
        network.in_warp = outer


def _without_arrays(network: Network, op: ir.Operation, key: Key) -> None:
    """An operation without a rule: scalar code, a branch without results."""
    arrays = any(map(is_array, (*op.operands, *op.results)))
    if arrays or op.name.startswith(logical.OWN):
        raise no_rule(op)
    for region in op.regions:
        for block in region.blocks:
            network.name_arguments(block, key)
            collect_block(network, block)


def no_rule(op: ir.Operation) -> errors.InternalError:
    """Returns the error for an operation on arrays that has no rule."""
    return errors.InternalError(
        f"Layout inference has no rule for {op.name}",
        got=str(op)[:200],
        where=sources.where(op),
    )


# --- what the rules share -------------------------------------------------------------


def is_vector(value: ir.Value) -> bool:
    """Whether a value is an array in registers."""
    return isinstance(value.type, ir.VectorType)


def is_array(value: ir.Value) -> bool:
    """Whether a value is an array in registers or in memory."""
    return isinstance(value.type, ir.VectorType | ir.MemRefType)


def vector_operands(op: ir.Operation) -> list[int]:
    """Positions of the operands that are arrays in registers."""
    return [i for i, x in enumerate(op.operands) if is_vector(x)]


def array_of(network: Network, op: ir.Operation, i: int) -> Part:
    """Returns the part of an array that operand `i` of an operation is."""
    part = network.part(op.operands[i])
    if part is None:
        raise errors.InternalError(
            "A memref that is neither an SMEM array nor a kernel's buffer",
            got=str(op.operands[i]),
            where=sources.where(op),
        )
    return part


def use_as_pointers(network: Network, op: ir.Operation) -> None:
    """An operation that uses the addresses of arrays in memory."""
    for operand in op.operands:
        if isinstance(operand.type, ir.MemRefType):
            part = network.part(operand)
            if part is not None:
                use = Use(op, "pointer", part, network.weight)
                network.use_memory(use)
