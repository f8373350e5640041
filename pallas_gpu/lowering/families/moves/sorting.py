# SPDX-License-Identifier: Apache-2.0
"""Sorting networks: rows that are divided among threads that follow each other."""

from __future__ import annotations

import math
from typing import Any

from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.moves import network
from pallas_gpu.layouts.registers.divided import divided_layout
from pallas_gpu.layouts.registers.linear import THREADS, WARP_LANES
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.moves.lanes import in_layout, threads_of
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits_and_relates
from pallas_gpu.primitives.moves.sorting import sort_network_p

# Elements of a row that a thread sorts by itself, if lanes could have them instead: the
# code of their steps is unrolled. Estimate.
_MOST_UNROLLED = 16
# Elements of a row that a warp sorts by itself, if others could take part: a thread has
# 32 of them.
_MOST_IN_WARP = 1024


def _elements(shape: tuple[int, ...], axis: int, threads: int) -> int:
    """Returns how many elements of a row a thread has."""
    size = shape[axis]
    rows = math.prod(n & -n for a, n in enumerate(shape) if a != axis)
    # All threads have elements, if there are as many.
    fewest = max(1, threads // min(rows, threads))
    least = size // threads
    if rows * WARP_LANES >= threads and size <= _MOST_IN_WARP:
        least = size // WARP_LANES  # warps have rows of their own
    return max(min(size // min(fewest, size), _MOST_UNROLLED), least, 1)


@emits_and_relates(sort_network_p)
def _sort_network(on: RuleContext | Node, *arrays: Any) -> list[Any]:
    axis, n_keys = on.op.params["axis"], on.op.params["n_keys"]
    shape, threads = tuple(arrays[0].shape), threads_of(on)
    elements = _elements(shape, axis, threads)
    layout = divided_layout(shape, axis, elements, threads)
    if isinstance(on, Node):
        results = []
        for i, (x, aval) in enumerate(zip(arrays, on.op.results, strict=True)):
            variable = on.variable(x, "sorted", fixed=layout)
            on.take(x, variable, i)
            results.append(on.make(variable, aval, i))
        return results
    placed = [in_layout(on, x, i, layout, "sorted") for i, x in enumerate(arrays)]
    room = None
    if shape[axis] > elements * WARP_LANES:
        bits = sum(max(dtypes.bits(x.dtype), 32) for x in placed)
        words = min(layout.num_registers * bits // 32, network.MOST_WORDS)
        room = scratch.for_data(on.kernel, words * 4 * THREADS)
    sorted_ = network.sort(placed, axis, n_keys, elements, room)
    return [on.result(x, i) for i, x in enumerate(sorted_)]
