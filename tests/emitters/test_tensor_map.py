# SPDX-License-Identifier: Apache-2.0
"""TMA descriptors travel in the IR and end as host code."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.emitters import tensor_map
from pallas_gpu.emitters.tensor_map import TensorMap
from tests.support import everywhere
from tests.support.finished import emitted, typed
from tests.support.refusal import refused
from tests.support.semantics import BOTH, under

VALID = {
    "buffer_index": 0,
    "dtype": "float16",
    "sizes": (256, 64),
    "strides": (64, 1),
    "box": (8, 64),
    "swizzle": 128,
}


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": (1,) * 6, "strides": (1,) * 6, "box": (1,) * 6},
        {"box": (8,)},
        {"strides": (64, 2)},
        {"box": (257, 64)},
        {"swizzle": 48},
    ],
    ids=["rank", "box of another rank", "stride", "box", "swizzle"],
)
@refused
def test_what_the_hardware_cannot_do_is_refused(change):
    TensorMap(**{**VALID, **change})


@everywhere.tests(emitted, [typed((256, 64), "float16")])
def test_the_tag_carries_the_whole_descriptor(kb, unused):
    wanted = TensorMap(**{**VALID, "offset_elems": 128})
    pointer = tensor_map.tensor_map_pointer(wanted)
    tag = pointer.owner.attributes[tensor_map.TAG]
    assert TensorMap.from_attribute(tag) == wanted


@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        ("int8", 1), ("uint16", 2), ("uint32", 3), ("uint64", 4), ("float16", 5),
        ("float32", 6), ("bfloat16", 7), ("int32", 9), ("int64", 10),
        ("float8_e4m3fn", 1),
    ],
)  # fmt: skip
def test_element_types_have_the_numbers_of_the_runtime(dtype, code):
    import ml_dtypes  # noqa: F401 - registers the names with NumPy

    assert TensorMap(**{**VALID, "dtype": dtype}).element_code == code


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("maps", [0, 1, 2])
def test_a_kernel_fetches_its_descriptors_first(maps, semantics):
    shape = (16, 32) if maps else (512,)

    def body(x, o, tile, full):
        plgpu.copy_gmem_to_smem(x, tile, full)
        plgpu.barrier_wait(full)
        if maps == 1:
            o[...] = tile[...]
        else:
            plgpu.copy_smem_to_gmem(tile, o)
            plgpu.wait_smem_to_gmem(0)

    scratch = plgpu.SMEM(shape, jnp.float32), plgpu.Barrier()
    x = np.ones(shape, np.float32)
    function = everywhere.kernel(body, x, *scratch)()
    (report,) = plgpu.offline.compile(under(semantics, function), x)
    lines = report.ptx.splitlines()
    found = [i for i, line in enumerate(lines) if "prefetch.tensormap" in line]
    assert len(found) == maps
    assert all(lines[i].strip().startswith("@%p") for i in found)
    first = next(i for i, line in enumerate(lines) if "mbarrier.init" in line)
    assert all(i < first for i in found)
    assert report.resources.spill_store_bytes == 0
