# SPDX-License-Identifier: Apache-2.0
"""Stores to the memory of all devices, and loads that combine it."""

from __future__ import annotations

from typing import Any

from pallas_gpu.lowering.families import registers
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits_and_relates
from pallas_gpu.primitives.devices import multimem as primitives


@emits_and_relates(primitives.multimem_store_p)
def _store(on: Any, dst: Any, value: Any) -> None:
    registers.write(on, dst, value)


@emits_and_relates(primitives.multimem_load_reduce_p)
def _load(on: Any, src: Any, *, reduction_op: str) -> Any:
    # A mesh of one device has nothing to combine.
    combines = not isinstance(on, Node) and on.builder.spec.devices > 1
    return registers.read(on, src, reduction=reduction_op if combines else None)
