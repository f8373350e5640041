# SPDX-License-Identifier: Apache-2.0
"""Whatever inference chooses, the layouts around each operation fit that operation."""

from __future__ import annotations

import random

import pytest
from jaxlib.mlir import ir

from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.moves import costs
from pallas_gpu.layouts.registers.placement import place
from tests.support.inference_bodies import Body, operations

SCRATCH = 2048
SHAPE = (128, 64)


def check_relayouts(op: ir.Operation, found) -> None:
    """What arrives in another layout than it was made in can be moved."""
    for i, operand in enumerate(op.operands):
        made, wanted = found.result(operand), found.operand(op, i)
        if made is None or wanted is None or made == wanted:
            continue
        bits = operand.type.element_type.width
        assert costs.relayout_cost(made, wanted, bits, SCRATCH) is not None, op


def check_operation(op: ir.Operation, found) -> None:
    """The layouts of operands and result fit each other."""
    operand = found.operand(op, 0) if len(op.operands) else None
    result = found.result(op.results[0]) if len(op.results) else None
    if operand is None:  # a load, a loop, or all of it is deferred
        return
    match op.name:
        case "vector.multi_reduction" if result is not None:
            axes = list(ir.DenseI64ArrayAttr(op.attributes["reduction_dims"]))
            assert result == operand.reduce(axes)
        case "mosaic_gpu.broadcast_in_dim" if result is not None:
            dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
            assert result.broadcast_matches(operand, dims)
        case "vector.shape_cast":
            # Where they are not those of the operand's registers, data moves.
            assert result.shape == tuple(op.results[0].type.shape)
            assert operand.shape == tuple(op.operands[0].type.shape)
        case "vector.transpose":
            order = list(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
            assert result == operand.transpose(order)
        case "vector.extract_strided_slice":
            starts, sizes = (
                [ir.IntegerAttr(x).value for x in op.attributes[name]]
                for name in ("offsets", "sizes")
            )
            assert result == operand.slice(starts, sizes)
        case "mosaic_gpu.wgmma":
            wgmma = place(Layout.WGMMA, op.results[0].type.shape)
            assert operand == result == wgmma
        case name if name.startswith("pallas_gpu."):
            for i in range(len(op.operands)):
                assert found.operand(op, i) == result


def random_body(seed: int) -> Body:
    """Some of every operation, on values of one shape and of its transpose."""
    rng = random.Random(seed)
    body = Body()
    with body.building() as b:
        gmem, smem = b.gmem(SHAPE), b.smem(SHAPE)
        left, right = b.smem(SHAPE, "f16"), b.smem((64, 64), "f16")
        live = [b.load(gmem), b.splat(SHAPE)]

        def step() -> None:
            x, y = (rng.choice(live[-6:]) for _ in range(2))
            match rng.choice("ealsrtwpbc"):
                case "e":
                    live.append(b.op("exp", x))
                case "a":
                    live.append(b.op("add", x, y))
                case "l":
                    live.append(b.load(rng.choice([gmem, smem])))
                case "s":
                    b.store(x, rng.choice([gmem, smem]))
                case "r":
                    axis = rng.randrange(2)
                    row = b.reduce(x, [axis])
                    live.append(b.broadcast(row, SHAPE, [1 - axis]))
                case "t":
                    live.append(b.reshape(b.transpose(x, [1, 0]), SHAPE))
                case "w":
                    narrow = b.op("convert_element_type", x, element="f16")
                    live.append(b.barrier(b.wgmma(y, narrow, right)))
                    b.wgmma(y, left, right)
                case "p":
                    half = b.slice(x, [64, 0], [64, 64])
                    again = b.broadcast(
                        b.reshape(half, (1, 64, 64)), (2, 64, 64), [0, 1, 2]
                    )
                    live.append(b.reshape(again, SHAPE))
                case "b":
                    type_ = x.type
                    live.extend(
                        b.branch(lambda: [b.op("neg", x)], lambda: [y], [type_])
                    )
                case "c":
                    live.extend(b.loop([x], lambda i, v: [b.op("mul", v, y)], trips=3))

        for _ in range(25):
            step()
        b.store(live[-1], gmem)
    return body


@pytest.mark.parametrize("seed", range(12))
def test_the_layouts_of_a_random_body_fit_its_operations(seed: int):
    body = random_body(seed)
    found = body.infer(SCRATCH)
    for op in operations(body.block):
        check_operation(op, found)
        check_relayouts(op, found)
