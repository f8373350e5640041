# SPDX-License-Identifier: Apache-2.0
"""Objects and functions of JAX's Pallas where those of this package are meant."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as upstream
from jax.experimental.pallas import tpu, triton

import pallas_gpu as plgpu
from tests.support.entry_kernels import f32, make, numbers, run
from tests.support.refusal import refused


def block(*shape, **options):
    return plgpu.BlockSpec(shape, lambda i: (i, 0), **options)


PASSED = {
    "kernel: scratch": lambda: make(
        print, scratch_types=[upstream.SMEM((8,), jnp.float32)]
    ),
    "kernel: named scratch": lambda: make(
        print, scratch_types={"b": upstream.Barrier()}
    ),
    "kernel: an accumulator": lambda: make(
        print, scratch_types=[upstream.ACC((64, 64))]
    ),
    "kernel: memory of a TPU": lambda: make(
        print, scratch_types=[tpu.VMEM((8,), jnp.float32)]
    ),
    "kernel: parameters": lambda: make(
        print, compiler_params=upstream.CompilerParams()
    ),
    "pallas_call: specs": lambda: plgpu.pallas_call(
        print, f32(), in_specs=[pl.BlockSpec()]
    ),
    "pallas_call: grid_spec": lambda: plgpu.pallas_call(
        print, f32(), grid_spec=pl.GridSpec()
    ),
    "SMEM: transforms": lambda: plgpu.SMEM(
        (8, 64), jnp.float16, transforms=[upstream.TilingTransform((8, 64))]
    ),
    "BlockSpec: a dimension": lambda: block(pl.Element(8), 128),
    "BlockSpec: memory_space": lambda: block(8, 128, memory_space=upstream.GMEM),
    "load: layout": lambda: run(
        lambda x, o: plgpu.load(x, layout=upstream.Layout.WGMMA)
    ),
    "run_scoped": lambda: run(lambda x, o: plgpu.run_scoped(print, upstream.Barrier())),
    "without a counterpart": lambda: make(
        print, scratch_types=[next(iter(tpu.CoreType))]
    ),
}


@pytest.mark.parametrize("call", PASSED.values(), ids=PASSED)
@refused
def test_an_object_of_jaxs_pallas_is_refused_by_the_name_of_ours(call):
    call()


def discard(value):
    """A body returns nothing."""


CALLED = {
    "program_id": lambda x, o: pl.program_id(0),
    "run_scoped": lambda x, o: pl.run_scoped(lambda s: None, upstream.SMEM((8,), "f4")),
    "run_scoped around a loop": lambda x, o: pl.run_scoped(
        lambda s: plgpu.loop(0, 2, num_stages=2)(lambda i: discard(x[i] + s[...])),
        upstream.SMEM((128,), jnp.float16),
    ),
    "copy_gmem_to_smem": lambda x, o: upstream.copy_gmem_to_smem(x, o, x),
    "wait_smem_to_gmem": lambda x, o: upstream.wait_smem_to_gmem(0),
    "load": lambda x, o: discard(triton.load(x)),
    "store": lambda x, o: triton.store(o, x[...]),
    "atomic_add": lambda x, o: discard(triton.atomic_add(o, (0, 0), 1.0)),
}


@pytest.mark.parametrize("name", CALLED)
@refused
def test_a_function_of_jaxs_pallas_is_refused_by_the_name_of_ours(name):
    run(CALLED[name])


def test_functions_that_both_share_work():
    def body(x, o):
        @pl.when(plgpu.program_id(0) == 0)
        def _():
            o[pl.ds(0, 64)] = x[pl.ds(0, 64)]

    got = make(body, grid=(1,), grid_names=("i",))(numbers())
    assert (got == numbers()).all()
