# SPDX-License-Identifier: Apache-2.0
"""Kernels built by hand: their text, their PTX, and, on a GPU, their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from jaxlib.mlir import ir

from pallas_gpu.runtime import offline_compiler as offline
from pallas_gpu.runtime import serialize
from tests.support import card
from tests.support.everywhere import has_gpu
from tests.support.finished import emitted
from tests.support.finished import typed as typed_of
from tests.support.lockstep import bodies as lockstep
from tests.support.programs import Program


@pytest.fixture
def build() -> Callable[..., ir.Module]:
    """The finished module of a body."""
    return emitted


@pytest.fixture
def compile_kernel() -> Callable[..., offline.CompiledModule]:
    """The compiled form of a body, made without a GPU."""

    def run(emit, operands: Sequence = (), results: Sequence = (), **spec):
        return offline.compile_module(
            serialize.serialize(emitted(emit, operands, results, **spec)),
            name="kernel",
            target="sm_90a",
            operand_avals=[typed_of(x.shape, x.dtype) for x in operands],
            result_avals=[typed_of(x.shape, x.dtype) for x in results],
            smem_bytes=spec.get("smem_bytes", 0),
            num_barriers=0,
            threads=spec.get("threads", 128),
        )

    return run


@pytest.fixture
def run_kernel() -> Callable[..., list[np.ndarray]]:
    """The results of a body: of a run on the GPU, in lockstep where there is none."""
    if not has_gpu():
        return lockstep.run

    def run(emit, operands: Sequence, results: Sequence, **spec):
        module = emitted(emit, operands, results, **spec)
        return card.run_module(module, operands, results)

    return run


@pytest.fixture
def computes(run_kernel) -> Callable[[Program], None]:
    """Runs a program, which has to give what it should."""

    def check(program: Program) -> None:
        spec = {"smem_bytes": program.smem_bytes}
        arrays = program.operands, program.expected
        assert program.is_right(run_kernel(program.emit, *arrays, **spec))

    return check


@pytest.fixture
def typed():
    """Shape and dtype of an operand or result."""
    return typed_of


@pytest.fixture
def sample(rng: np.random.Generator):
    """An array with ordinary and awkward values."""

    def make(shape: Sequence[int], dtype) -> np.ndarray:
        dtype = np.dtype(dtype)
        size = int(np.prod(shape))
        if dtype == np.bool_:
            return rng.integers(0, 2, shape).astype(dtype)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            flat = rng.integers(limits.min, limits.max, size, dtype, endpoint=True)
            special = [0, 1, 2, 3, limits.max, limits.min, limits.max - 1, 7]
        else:
            flat = (rng.normal(size=size) * 4).astype(dtype)
            special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5]
        flat[: len(special)] = np.array(special).astype(dtype)
        return rng.permutation(flat).reshape(shape)

    return make
