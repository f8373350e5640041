# SPDX-License-Identifier: Apache-2.0
"""Upstream's collectives with changed imports equal those of `jax.lax` in the emulator.

`tests/differential/test_devices.py` compares their instructions with upstream's.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.installed_kernels import ported
from tests.support.meshes import emulated, mesh, numbers

ROWS, COLUMNS = jax.P("d"), jax.P(None, "d")
# Semaphores are not zero in the end, and one program stores to its input (never).
SCHEDULES = plgpu.InterpretParams(schedules=20, like_upstream=True)


@pytest.fixture(autouse=True)
def schedules(monkeypatch):
    """Upstream's programs do not say how their kernels run."""
    kernel = functools.partial(plgpu.kernel, interpret=SCHEDULES)
    monkeypatch.setattr(plgpu, "kernel", kernel)


upstreams = functools.cache(ported)


def check(ours, theirs, *args, devices, **specs):
    f = emulated(ours, mesh(d=devices), check_vma=False, **specs)
    expected = emulated(theirs, mesh(d=devices), check_vma=False, **specs)(*args)
    np.testing.assert_array_equal(f(*args), expected)


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("dimension", [0, 1])
def test_all_gather(devices, dimension):
    check(
        functools.partial(
            upstreams("all_gather_mgpu").all_gather,
            axis_name="d", gather_dimension=dimension, num_blocks=2,
        ),
        lambda x: lax.all_gather(x, "d", axis=dimension, tiled=True),
        numbers(4 * devices, 256),
        devices=devices,
    )  # fmt: skip


REDUCTIONS = {"add": lax.psum, "min": lax.pmin, "max": lax.pmax}


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize(
    ("dimension", "reduction"), [(0, "add"), (1, "max"), (None, "add"), (None, "min")]
)
def test_reduce_scatter(devices, dimension, reduction):
    def theirs(x):
        whole = REDUCTIONS[reduction](x, "d")
        if dimension is None:
            return whole
        size = x.shape[dimension] // devices
        start = lax.axis_index("d") * size
        return lax.dynamic_slice_in_dim(whole, start, size, dimension)

    dtype = "bfloat16" if reduction == "add" else "int32"
    check(
        functools.partial(
            upstreams("reduce_scatter_mgpu").reduce_scatter,
            axis_name="d", scatter_dimension=dimension, reduction=reduction,
            num_blocks=2,
        ),
        theirs,
        numbers(8 * devices, 1024, dtype=dtype, most=1),
        devices=devices,
    )  # fmt: skip


def product(devices, tiles, ctas, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda *_: devices)
    monkeypatch.setattr(jax, "local_device_count", lambda *_: devices)
    cores = "jax.devices()[0].core_count"
    module = upstreams("collective_matmul_mgpu", cores, str(ctas))
    config = module.TuningConfig(
        tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2
    )
    check(
        lambda x, w: module.all_gather_lhs_matmul(
            x, w, "d", config=config, dtype=jnp.float16
        ),
        lambda x, w: lax.all_gather(x, "d", axis=0, tiled=True) @ w,
        numbers(64 * tiles * devices, 128, dtype="float16"),
        numbers(128, 128 * devices, dtype="float16"),
        devices=devices, in_specs=(ROWS, COLUMNS), out_specs=COLUMNS,
    )  # fmt: skip


@pytest.mark.parametrize(("devices", "tiles"), [(2, 2), (4, 1), (8, 1)])
def test_a_product_of_gathered_rows(devices, tiles, monkeypatch):
    product(devices, tiles, tiles, monkeypatch)


RACES = {
    # From the third device on: the signals of one CTA for two steps are taken for those
    # of two CTAs for one step.
    "signals": (2, 2, "read by one device and written by another"),
    # A CTA's next tile: nothing waits for the copy of the last step of the one before.
    "copies": (2, 1, "is written while the copy .* may still read it"),
}


@pytest.mark.parametrize("name", RACES)
def test_the_product_of_gathered_rows_has_races(name, monkeypatch):
    tiles, ctas, text = RACES[name]
    with pytest.raises(errors.RaceError, match=text):
        product(4, tiles, ctas, monkeypatch)
