# SPDX-License-Identifier: Apache-2.0
"""Cluster barriers count the arrivals that upstream's count."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

if not jax.__version__.startswith("0.11."):
    pytest.skip("compares with upstream 0.11", allow_module_level=True)

from tests.support.differential import sides

OUT = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def arrivals(side, axes, **options):
    """The count with which the one barrier of a kernel is initialised."""
    names = side.names

    def body(x, o, barrier):
        names.barrier_arrive(barrier)
        names.barrier_wait(barrier)
        o[...] = x[...]

    kernel = names.kernel(
        body, out_type=OUT, cluster=(2, 4), cluster_names=("x", "y"),
        scratch_types=[names.ClusterBarrier(collective_axes=axes, **options)],
        compiler_params=side.params("Lane"),
    )  # fmt: skip
    ptx = side.ptx(kernel, OUT)
    (count,) = re.findall(r"mbarrier\.init\.shared\.b64 \[\S+\], (%\w+);", ptx)
    (value,) = re.findall(rf"mov\.b32 \t?{count}, (\d+);", ptx)
    return int(value)


@pytest.mark.offline
@pytest.mark.parametrize(
    ("axes", "options", "expected"),
    [
        (("x",), {}, 2),
        (("y",), {"num_arrivals": 3}, 12),
        (("x", "y"), {}, 5),
        ((("x", "y"),), {}, 8),
        ((("y", "x"),), {"num_arrivals": 2}, 16),
        (("y",), {"leader_tracked": True}, 4),
    ],
    ids=str,
)
def test_a_phase_has_as_many_arrivals_as_upstreams(axes, options, expected):
    ours, theirs = (arrivals(side, axes, **options) for side in sides.both())
    assert ours == theirs == expected
