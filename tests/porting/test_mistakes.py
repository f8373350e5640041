# SPDX-License-Identifier: Apache-2.0
"""A mistake raises what it raises upstream: the same built-in class, or a narrower one.

Each mistake is one function of two modules, upstream's or ours, and runs in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as upstream

import pallas_gpu as plgpu
from pallas_gpu import errors

pytestmark = pytest.mark.skipif(
    not jax.__version__.startswith("0.11."), reason="compares with upstream 0.11"
)

F16, BF16, F32, I32 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.int32
SHAPE = (64, 128)
OUT = jax.ShapeDtypeStruct(SHAPE, F32)


@dataclasses.dataclass(frozen=True)
class Modules:
    """The names of `pl` and `plgpu`, upstream's or ours."""

    pl: Any
    gpu: Any

    def kernel(self, body: Callable[..., Any], *scratch: Any, **options: Any) -> Any:
        """Traces and lowers a kernel of one argument and one result."""
        kernel = self.gpu.kernel(body, out_type=OUT, scratch_types=scratch, **options)
        return jax.jit(kernel).trace(OUT).lower(lowering_platforms=("cuda",))

    @property
    def tile(self) -> Any:
        return self.gpu.SMEM(SHAPE, F32)

    @property
    def tile_and_barrier(self) -> Any:
        return self.tile, self.gpu.Barrier()

    def product(self, acc: Any, a: Any, b: Any) -> None:
        """A product of SMEM arrays, given as (shape, dtype)."""
        tiled = (self.gpu.TilingTransform((8, 64)), self.gpu.SwizzleTransform(128))

        def body(x, o, a, b):
            self.pl.run_scoped(
                lambda ref: self.gpu.wgmma(ref, a, b), self.gpu.ACC(*acc)
            )

        self.kernel(body, *(self.gpu.SMEM(*t, transforms=tiled) for t in (a, b)))

    def pipeline(self, *block: Any, **options: Any) -> None:
        """A pipeline over one input."""
        spec = self.gpu.BlockSpec(*block)
        options = {"grid": (2,), "in_specs": [spec], **options}
        self.kernel(
            lambda x, o: self.gpu.emit_pipeline(lambda _, x: None, **options)(x)
        )


def _set(ref, idx, value):
    ref[idx] = value


def _add(modules, array):
    modules.kernel(lambda x, o: _set(o, ..., x[...] + array))


def _square(dtype=F16):
    return (64, 64), dtype


# Bodies of a kernel without scratch.
BODIES: dict[str, Callable[[Modules, Any, Any], Any]] = {
    "a store of another type": lambda m, x, o: _set(o, ..., x[...].astype(F16)),
    "a negative number of copies": lambda m, x, o: m.gpu.wait_smem_to_gmem(-1),
    "a fraction of a copy": lambda m, x, o: m.gpu.wait_smem_to_gmem(1.5),
    "a negative number of products": lambda m, x, o: m.gpu.wgmma_wait(-1),
    "a store to a part of an accumulator": lambda m, x, o: m.pl.run_scoped(
        lambda acc: _set(acc, slice(0, 8), jnp.zeros((8, 64))), m.gpu.ACC((64, 64))
    ),
    "an initial value outside of run_state": lambda m, x, o: m.pl.run_scoped(
        lambda acc: None, m.gpu.ACC.init(jnp.zeros((64, 64)))
    ),
    "33 registers": lambda m, x, o: m.gpu.set_max_registers(33, action="increase"),
    "an unknown action": lambda m, x, o: m.gpu.set_max_registers(32, action="up"),
    "an iota of dimension 3": lambda m, x, o: m.gpu.broadcasted_iota(I32, SHAPE, 3),
    "a condition for each element": lambda m, x, o: m.pl.when(x[...] > 0)(lambda: None),
    "an unrolled rest": lambda m, x, o: m.pl.loop(0, 7, unroll=2)(lambda i: None),
    "Python's if": lambda m, x, o: _set(o, 0, 1.0) if x[0, 0] > 0 else None,
    "a store of another shape": lambda m, x, o: _set(o, ..., x[0:32]),
    "too many indices": lambda m, x, o: x[0, 0, 0],
    "an array as a barrier": lambda m, x, o: m.gpu.barrier_wait(x),
    "an unknown axis": lambda m, x, o: lax.axis_index("zz") and None,
}

MISTAKES: dict[str, Callable[[Modules], Any]] = {
    **{
        name: lambda m, body=body: m.kernel(lambda x, o: body(m, x, o))
        for name, body in BODIES.items()
    },
    "a cluster of four axes": lambda m: m.kernel(
        lambda x, o: None, cluster=(1,) * 4, cluster_names=tuple("abcd")
    ),
    "17 warpgroups": lambda m: m.kernel(
        lambda x, o: None, num_threads=17, thread_name="w"
    ),
    "a closed-over array": lambda m: _add(m, jnp.ones(SHAPE, F32)),
    # Copies and barriers
    "a copy to another type": lambda m: m.kernel(
        lambda x, o, s, b: m.gpu.copy_gmem_to_smem(x, s, b),
        m.gpu.SMEM(SHAPE, I32),
        m.gpu.Barrier(),
    ),
    "a copy to another shape": lambda m: m.kernel(
        lambda x, o, s, b: m.gpu.copy_gmem_to_smem(x.at[0:8], s, b), *m.tile_and_barrier
    ),
    "a copy out of another type": lambda m: m.kernel(
        lambda x, o, s: m.gpu.copy_smem_to_gmem(s, o), m.gpu.SMEM(SHAPE, I32)
    ),
    "a copy in the wrong direction": lambda m: m.kernel(
        lambda x, o, s, b: m.gpu.copy_gmem_to_smem(s, o, b), *m.tile_and_barrier
    ),
    "a copy of a value": lambda m: m.kernel(
        lambda x, o, s, b: m.gpu.copy_gmem_to_smem(x[...], s, b), *m.tile_and_barrier
    ),
    "a multicast along an unknown axis": lambda m: m.kernel(
        lambda x, o, s, b: m.gpu.copy_gmem_to_smem(x, s, b, collective_axes="zz"),
        *m.tile_and_barrier,
    ),
    "several barriers": lambda m: m.kernel(
        lambda x, o, b: m.gpu.barrier_wait(b), m.gpu.Barrier(num_barriers=3)
    ),
    "no arrivals": lambda m: m.gpu.Barrier(num_arrivals=0),
    # Tensor cores
    "shapes that form no product": lambda m: m.product(
        _square(F32), _square(), ((128, 64), F16)
    ),
    "operands of two types": lambda m: m.product(
        _square(F32), _square(), _square(BF16)
    ),
    "an accumulator of the wrong type": lambda m: m.product(
        _square(F16), _square(BF16), _square(BF16)
    ),
    "an unsigned accumulator": lambda m: m.product(
        _square(jnp.uint32), _square(), _square()
    ),
    "memory as an accumulator": lambda m: m.kernel(
        lambda x, o, s: m.gpu.wgmma(s, s, s), m.gpu.SMEM(*_square())
    ),
    "memory read as an accumulator": lambda m: m.kernel(
        lambda x, o, s: m.gpu.wgmma_accumulator_load(s), m.tile
    ),
    # Declarations
    "a swizzle of 48 bytes": lambda m: m.gpu.SwizzleTransform(48),
    "a swizzle wider than the tile": lambda m: m.kernel(
        lambda x, o, s: _set(s, ..., jnp.zeros((64, 64), F16)),
        m.gpu.SMEM(
            *_square(),
            transforms=(m.gpu.TilingTransform((8, 32)), m.gpu.SwizzleTransform(128)),
        ),
    ),
    "a power of two after -1": lambda m: m.pl.next_power_of_2(-1),
    "no swizzle that fits": lambda m: m.gpu.find_swizzle(100),
    "TMEM of a narrow type": lambda m: m.gpu.TMEM((128, 64), F16),
    "TMEM with transforms": lambda m: m.gpu.TMEM(
        (128, 64), F32, transforms=(m.gpu.SwizzleTransform(128),)
    ),
    "packed SMEM": lambda m: m.gpu.SMEM((128, 64), F16, packed=True),
    # Launches
    "an axis without a name": lambda m: m.kernel(lambda x, o: None, grid=(2,)),
    "threads without a name": lambda m: m.kernel(lambda x, o: None, num_threads=2),
    "a body of fewer references": lambda m: m.kernel(lambda x: None),
    "a type that is none": lambda m: m.gpu.kernel(lambda o: None, out_type="f32")(),
    "a scope of one warpgroup of two": lambda m: m.kernel(
        lambda x, o: m.pl.run_scoped(lambda s: None, m.tile),
        num_threads=2,
        thread_name="w",
    ),
    "no GPU": lambda m: m.gpu.kernel(lambda o: None, out_type=OUT, interpret=False)(),
    "a derivative": lambda m: jax.grad(
        lambda x: m.gpu.kernel(lambda x, o: None, out_type=OUT)(x).sum()
    )(jnp.ones(SHAPE, F32)),
    # Pipelines
    "a negative grid": lambda m: m.pipeline((8, 128), lambda i: (i, 0), grid=(-1,)),
    "a block of fewer dimensions": lambda m: m.pipeline((8,), lambda i: (i, 0)),
    "an index map of more axes": lambda m: m.pipeline((8, 128), lambda i, j: (i, 0)),
    "an index map of fewer indices": lambda m: m.pipeline((8, 128), lambda i: (i,)),
    "a tiling of another rank": lambda m: m.kernel(
        lambda x, o: m.gpu.nd_loop((4, 4), collective_axes="g", tiling=(2,))(print),
        grid=(2,),
        grid_names=("g",),
    ),
    "a tiling that leaves a rest": lambda m: m.kernel(
        lambda x, o: m.gpu.nd_loop((4, 4), collective_axes="g", tiling=(3, 2))(print),
        grid=(2,),
        grid_names=("g",),
    ),
}


def builtin(error: BaseException) -> type:
    """The first built-in class of an exception."""
    return next(c for c in type(error).__mro__ if c.__module__ == "builtins")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_raises_the_builtin_that_upstream_raises(mistake):
    with pytest.raises(Exception) as theirs:
        MISTAKES[mistake](Modules(pl, upstream))
    with pytest.raises(builtin(theirs.value)) as ours:
        MISTAKES[mistake](Modules(plgpu, plgpu))
    if mistake != "Python's if":  # an error of JAX in both
        assert isinstance(ours.value, errors.PallasGpuError)
