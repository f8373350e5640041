# SPDX-License-Identifier: Apache-2.0
"""Inline PTX of an author: its text for each group of a thread's elements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_gpu.emitters import operations
from pallas_gpu.emitters.elements import dtypes, words


def assemble(
    text: str,
    operands: Sequence[Sequence[ir.Value]],
    results: Sequence[np.dtype],
    pack: int,
    *,
    volatile: bool,
) -> list[list[ir.Value]]:
    """Emits the text for each group of elements; returns the results of a thread.

    The registers of the results come first, then those of the operands. A register has
    as many elements of a group as fit into 32 bits.

    Args:
      operands: for each the elements that a thread has, as many of each.
      results: for each its type.
      pack: how many elements a group has; the last one is filled up.
      volatile: whether it has to be executed, where it is.
    """
    made: list[list[ir.Value]] = [[] for _ in results]
    count = len(operands[0]) if operands else 1
    types = [dtypes.vector_type(dtype, pack) for dtype in results]
    for first in range(0, count, pack):
        groups = [_group(elements[first : first + pack], pack) for elements in operands]
        given = [word for column in words.to_words(groups) for word in column]
        for column, vector in zip(
            made, _one(text, given, types, volatile), strict=True
        ):
            column.extend(dtypes.elements(vector))
    return [column[:count] for column in made]


def _group(elements: Sequence[ir.Value], pack: int) -> ir.Value:
    filled = [*elements, *[elements[-1]] * (pack - len(elements))]
    return dtypes.pack(filled)


def _one(
    text: str, given: Sequence[ir.Value], results: Sequence[ir.Type], volatile: bool
) -> list[ir.Value]:
    """Emits the text once; returns a vector for each result."""
    each = [words.word_types(vector) for vector in results]
    made = [word for column in each for word in column]
    constraints = [f"={x}" for x in words.constraints_of(made)]
    constraints += words.constraints(given)
    constraints += ["~{memory}"] * volatile
    joined = ",".join(constraints)
    if not made:
        llvm.inline_asm(None, given, text, joined, has_side_effects=True)
        return []
    single = len(made) == 1
    result = operations.inline_assembly(
        made[0] if single else llvm.StructType.get_literal(made),
        given,
        text,
        joined,
        volatile=volatile,
    )
    held = [result] if single else dtypes.fields(result, made)
    return words.join(held, results)
