# SPDX-License-Identifier: Apache-2.0
"""Inference gives one answer for one kernel, and its work grows with the kernel."""

from __future__ import annotations

import random

import pytest

from pallas_gpu.layouts import Layout
from pallas_gpu.lowering.inference import constraints
from pallas_gpu.lowering.inference.network import Key, Network
from tests.support.inference_bodies import Body, large_body

SQUARE = (64, 64)


def independent_chains(order: list[int]) -> tuple[Body, dict]:
    """Chains without common values, emitted in an order; each has its own needs."""
    body, named = Body(), {}
    with body.building() as b:
        buffers = [b.gmem(SQUARE) for _ in range(8)]
        arrays = [b.smem(SQUARE, "f16") for _ in range(8)]

        def chain(i: int) -> None:
            x = b.load(buffers[i])
            y = b.op("exp", x)
            if i % 4 == 1:
                y = b.cast(y, Layout.WGMMA)
            if i % 4 == 2:
                row = b.reduce(y, [i // 4])
                y = b.op("sub", y, b.broadcast(row, SQUARE, [1 - i // 4]))
            if i % 4 == 3:
                narrow = b.op("convert_element_type", y, element="f16")
                b.wgmma(b.splat(SQUARE), narrow, arrays[i])
                b.store(narrow, arrays[i - 1])
            store = b.store(b.op("neg", y), buffers[i])
            named[i] = (x, y, store)

        for i in order:
            chain(i)
    named["arrays"] = arrays
    return body, named


def answers(body: Body, named: dict) -> list:
    found = body.infer()
    result = [found.smem(array) for array in named["arrays"]]
    for i in range(8):
        x, y, store = named[i]
        result += [found.result(x), found.result(y), found.operand(store, 0)]
    return result


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_independent_operations_does_not_matter(seed: int):
    order = list(range(8))
    random.Random(seed).shuffle(order)
    in_order = answers(*independent_chains(list(range(8))))
    assert answers(*independent_chains(order)) == in_order


def test_two_runs_on_one_body_agree():
    chains = independent_chains(list(range(8)))
    assert answers(*chains) == answers(*chains)


def test_the_work_grows_about_linearly_with_the_kernel():
    work = [large_body(n).infer().entries for n in (125, 250, 500)]
    assert work[1] < 3 * work[0]
    assert work[2] < 3 * work[1]


def test_keys_of_values_do_not_depend_on_what_stands_before_them():
    plain, before = Body(), Body()
    with plain.building() as b:
        b.op("exp", b.load(b.gmem(SQUARE)))
    with before.building() as b:
        buffer = b.gmem(SQUARE)
        b.iota((8, 8), 0)
        b.op("exp", b.load(buffer))
    keys = [
        [v.key for v in constraints.collect(body.block).variables]
        for body in (plain, before)
    ]
    assert keys[0] == keys[1]


def test_loads_of_different_arrays_have_different_keys():
    body = Body()
    with body.building() as b:
        for _ in range(2):
            b.load(b.gmem(SQUARE))
    first, second = constraints.collect(body.block).variables
    assert first.key != second.key


def test_a_key_is_computed_when_a_rule_needs_it():
    body = Body()
    with body.building() as b:
        x = b.load(b.gmem(SQUARE))
    network = Network()
    computed = []
    network.key_of = computed.append
    key = Key(network, x.owner.operation)
    assert not computed
    assert str(key) == str(key) == "None"
    assert computed == [x.owner.operation]
