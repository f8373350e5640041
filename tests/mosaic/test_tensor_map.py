# SPDX-License-Identifier: Apache-2.0
"""TMA descriptors travel in the IR and end as host code."""

from __future__ import annotations

import pytest

from pallas_gpu import errors
from pallas_gpu.mosaic import tensor_map
from pallas_gpu.mosaic.tensor_map import TensorMap

VALID = {
    "buffer_index": 0,
    "dtype": "float16",
    "sizes": (256, 64),
    "strides": (64, 1),
    "box": (8, 64),
    "swizzle": 128,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": (1,) * 6, "strides": (1,) * 6, "box": (1,) * 6}, "1 to 5 dim"),
        ({"box": (8,)}, "1 to 5 dimensions"),
        ({"strides": (64, 2)}, "must be contiguous"),
        ({"box": (257, 64)}, "1 to 256 elements"),
        ({"swizzle": 48}, "Unknown swizzle"),
    ],
)
def test_what_the_hardware_cannot_do_is_refused(change, message):
    with pytest.raises(errors.InternalError, match=message):
        TensorMap(**{**VALID, **change})


def test_the_tag_carries_the_whole_descriptor(build, typed):
    wanted = TensorMap(**{**VALID, "offset_elems": 128})

    def body(kb, unused):
        pointer = tensor_map.tensor_map_pointer(wanted)
        tag = pointer.owner.attributes[tensor_map.TAG]
        assert TensorMap.from_attribute(tag) == wanted

    build(body, [typed((256, 64), "float16")])


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
