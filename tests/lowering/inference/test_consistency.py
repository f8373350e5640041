# SPDX-License-Identifier: Apache-2.0
"""Whatever inference chooses, the layouts around each operation fit that operation."""

from __future__ import annotations

import random

import jax.numpy as jnp
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.emitters.elements import table
from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.moves import costs
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.lowering.inference.collect import Step
from tests.support.inferred import Inferred, array, infer

SCRATCH = 2048
SHAPE = (128, 64)
OUT = array(*SHAPE)


def check_relayouts(found: Inferred) -> None:
    """What arrives in another layout than it was made in can be moved."""
    for edge in found.network.edges:
        made, wanted = map(found.assignment.layout, (edge.producer, edge.consumer))
        if made != wanted:
            cost = costs.relayout_cost(made, wanted, edge.bits, SCRATCH)
            assert cost is not None, edge.consumer.variable.name


def check_operation(step: Step, found: Inferred) -> None:
    """The layouts of operands and result fit each other."""
    op, operands = step.node.op, found.operands(step)
    if not operands:  # a load, or all of it is deferred
        return
    operand, result = operands[0], next(iter(found.results(step)), None)
    match op.name:
        case "reduce_sum":
            assert result == operand.reduce(op.params["axes"])
        case "broadcast_in_dim":
            dims = op.params["broadcast_dimensions"]
            assert result.broadcast_matches(operand, dims)
        case "transpose":
            assert result == operand.transpose(op.params["permutation"])
        case "reshape" | "slice":
            # Where they are not those of the operand's registers, data moves.
            assert result.shape == op.results[0].shape
            assert operand.shape == op.inputs[0].shape
        case "wgmma":
            assert operands == [place(Layout.WGMMA, SHAPE)]
        case name if name in {"scan", "cond", *table.TABLE}:
            assert {result} == {*operands}


def random_body(seed: int):
    """Some of every operation, on values of one shape and of its transpose."""

    def body(x_ref, o_ref, smem, left, right, acc):
        rng = random.Random(seed)
        live = [x_ref[...], jnp.full(SHAPE, x_ref[0, 0])]

        def step() -> None:
            x, y = (rng.choice(live[-6:]) for _ in range(2))
            match rng.choice("ealsrtwpbc"):
                case "e":
                    live.append(jnp.exp(x))
                case "a":
                    live.append(x + y)
                case "l":
                    live.append(rng.choice([x_ref, smem])[...])
                case "s":
                    rng.choice([o_ref, smem])[...] = x
                case "r":
                    axis = rng.randrange(2)
                    row = jnp.sum(x, axis)
                    live.append(lax.broadcast_in_dim(row, SHAPE, (1 - axis,)))
                case "t":
                    live.append(x.T.reshape(SHAPE))
                case "w":
                    acc[...] = y
                    plgpu.wgmma(acc, x.astype(jnp.float16), right)
                    plgpu.wgmma(acc, left, right)
                    live.append(acc[...])
                case "p":
                    half = lax.slice(x, (64, 0), SHAPE)
                    again = jnp.broadcast_to(half.reshape(1, 64, 64), (2, 64, 64))
                    live.append(again.reshape(SHAPE))
                case "b":
                    live.append(lax.cond(x_ref[0, 0] > 0, lambda: -x, lambda: y))
                case "c":
                    live.append(lax.fori_loop(0, 3, lambda _, v: v * y, x))

        for _ in range(25):
            step()
        o_ref[...] = live[-1]

    return body


@pytest.mark.parametrize("seed", range(12))
def test_the_layouts_of_a_random_body_fit_its_operations(seed: int):
    smem = [plgpu.SMEM(SHAPE, jnp.float32)]
    smem += [plgpu.SMEM(shape, jnp.float16) for shape in (SHAPE, (64, 64))]
    body, acc = random_body(seed), plgpu.ACC(SHAPE)
    found = infer(body, [OUT], OUT, *smem, acc, scratch_bytes=SCRATCH)
    check_relayouts(found)
    for step in found.steps:
        check_operation(step, found)
