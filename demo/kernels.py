# SPDX-License-Identifier: Apache-2.0
"""The two kernels of the demo, with data and a reference for each.

Tests import them from here, so the demo runs the tested kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu

ROWS = 64  # rows of a tile, which one warpgroup holds in registers
COLUMNS = 128
SWIZZLE_BYTES = 128  # the widest of TMA's swizzles
SCALE = 0.7


# --- (a) blocks by pallas_call --------------------------------------------------------


def scale_and_add(
    x: Any, y: Any, *, compiler_params: Any = None, interpret: Any = None
) -> jax.Array:
    """Computes `SCALE * x + y` for two matrices of equal shape, block by block.

    The grid covers the matrix; blocks may exceed its bounds.
    """
    block = plgpu.BlockSpec((ROWS, COLUMNS), lambda i, j: (i, j))
    call = plgpu.pallas_call(
        _scale_and_add_body,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(plgpu.cdiv(x.shape[0], ROWS), plgpu.cdiv(x.shape[1], COLUMNS)),
        in_specs=[block, block],
        out_specs=block,
        compiler_params=compiler_params,
        interpret=interpret,
        name="scale_and_add",
    )
    return call(x, y)


def _scale_and_add_body(x_ref, y_ref, o_ref):
    o_ref[...] = SCALE * x_ref[...] + y_ref[...]


# --- (b) explicit copies --------------------------------------------------------------


def shifted_exp(
    x: Any, *, compiler_params: Any = None, interpret: Any = None
) -> jax.Array:
    """Computes `exp(x - max(x))` of each row; x has COLUMNS columns.

    Each block copies its rows to swizzled SMEM by TMA, computes in registers in
    float32, and stores them back by TMA.
    """
    itemsize = jnp.dtype(x.dtype).itemsize
    tile = plgpu.SMEM(
        (ROWS, COLUMNS),
        x.dtype,
        transforms=[
            plgpu.TilingTransform((8, SWIZZLE_BYTES // itemsize)),
            plgpu.SwizzleTransform(SWIZZLE_BYTES),
        ],
    )
    call = plgpu.kernel(
        _shifted_exp_body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // ROWS,),
        grid_names=("rows",),
        scratch_types=[tile, plgpu.Barrier()],
        compiler_params=compiler_params,
        interpret=interpret,
        name="shifted_exp",
    )
    return call(x)


def _shifted_exp_body(x_gmem, o_gmem, x_smem, loaded):
    rows = plgpu.ds(jax.lax.axis_index("rows") * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, loaded)
    plgpu.barrier_wait(loaded)
    x = x_smem[...].astype(jnp.float32)
    result = jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
    x_smem[...] = result.astype(x_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(x_smem, o_gmem.at[rows])
    plgpu.wait_smem_to_gmem(0)


# --- data and references --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """A kernel, arguments for it, and a reference.

    Attributes:
      name: the kernel's name.
      what: a one-line description.
      function: `function(*arguments, compiler_params=..., interpret=...)` calls the
        kernel.
      arguments: NumPy arrays.
      reference: computes the result with NumPy, in float64.
      tolerance: maximum absolute error due to rounding.
      target: for which it is compiled.
    """

    name: str
    what: str
    function: Callable[..., jax.Array]
    arguments: tuple[np.ndarray, ...]
    reference: Callable[..., np.ndarray]
    tolerance: float
    target: str = "sm_90a"

    def jitted(
        self, interpret: Any = None, semantics: Any = None
    ) -> Callable[..., jax.Array]:
        """Returns the function under `jax.jit`."""
        params = plgpu.CompilerParams(target=self.target)
        if semantics is not None:
            params = dataclasses.replace(params, lowering_semantics=semantics)
        return jax.jit(
            functools.partial(
                self.function, compiler_params=params, interpret=interpret
            )
        )

    def error(self, result: Any) -> float:
        """Returns the maximum absolute error; NaN if a result is NaN."""
        expected = self.reference(*self.arguments)
        result = np.asarray(result)
        if result.shape != expected.shape:
            raise ValueError(f"{self.name}: {result.shape}, not {expected.shape}")
        return float(np.max(np.abs(result.astype(np.float64) - expected)))


def scale_and_add_job(shape: tuple[int, int] = (300, 1000)) -> Job:
    """A job for `scale_and_add`; the default's blocks exceed both bounds."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape, np.float32) for _ in range(2))
    return Job(
        "scale_and_add",
        "pallas_call on a 2-D grid of blocks",
        scale_and_add,
        (x, y),
        lambda x, y: SCALE * x.astype(np.float64) + y,
        # Sums are below 16, where the spacing of float32 is 2**-20.
        tolerance=2.0**-20,
    )


def shifted_exp_job(rows: int = 512, dtype: Any = np.float16) -> Job:
    """A job for `shifted_exp`."""
    x = np.random.default_rng(1).standard_normal((rows, COLUMNS), np.float32)

    def reference(x):
        x = x.astype(np.float64)
        return np.exp(x - x.max(axis=1, keepdims=True))

    return Job(
        "shifted_exp",
        "kernel with explicit TMA, an mbarrier and swizzled SMEM",
        shifted_exp,
        (x.astype(dtype),),
        reference,
        # Results are at most 1: rounding to dtype contributes half of eps, float32's
        # exp the rest.
        tolerance=float(jnp.finfo(dtype).eps) / 2 + 1e-6,
    )
