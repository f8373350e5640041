# SPDX-License-Identifier: Apache-2.0
"""lax's operations for every element type: the module as JAX, and libtpu takes it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from tests.support import tiers
from tests.support.sparsecore import emitted, interpreter, lax_operations
from tests.support.sparsecore.kernels import kernel
from tests.support.sparsecore.modules import CHIPS, needs_libtpu
from tools.sparsecore_table import PAGE, operations_of

DTYPES = (*lax_operations.DTYPES, *lax_operations.UNSIGNED)
_TOLERANCE = {"float32": 2e-5, "bfloat16": 0.03}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_module_computes_what_jax_does(dtype, chip):
    if not tiers.runs_everything() and tiers.one_of(dtype, CHIPS) != chip:
        pytest.skip("another chip stands for it")
    x, y = lax_operations.values(dtype, chip)
    chosen = lax_operations.names(dtype)
    operations = lax_operations.kernel_of(chosen, dtype, chip)
    build = emitted.lowered(operations, x, y, target=chip)
    (got,) = interpreter.execute(build.module, x, y)
    rows = got.view(x.dtype).reshape(len(chosen), -1).astype(np.float64)
    expected = lax_operations.expected(chosen, x, y)
    for name, row, want in zip(chosen, rows, expected, strict=True):
        want, tolerance = want.astype(np.float64), _TOLERANCE.get(dtype, 0)
        np.testing.assert_allclose(row, want, tolerance, tolerance, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_scalar_subcore_computes_what_jax_does(dtype):
    x = np.array([-2, 3, *[0] * 6]).astype(dtype)
    chosen = lax_operations.scalar_names(dtype)
    operations = lax_operations.scalar_kernel_of(chosen, dtype, "tpu7x")
    build = emitted.lowered(operations, x)
    (got,) = interpreter.execute(build.module, x)
    for name, value in zip(chosen, got, strict=False):
        want = np.asarray(lax_operations.SCALARS[name][0](x[0], x[1]))
        np.testing.assert_allclose(value, want.astype(dtype), 1e-6, err_msg=name)


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_libtpu_takes_all_of_them(dtype, chip):
    if not tiers.runs_everything() and tiers.one_of(dtype, CHIPS) != chip:
        pytest.skip("another chip stands for it")
    x, y = lax_operations.values(dtype, chip)
    operations = lax_operations.kernel_of(lax_operations.names(dtype), dtype, chip)
    assert emitted.compiled(operations, x, y, target=chip).program.vector.bundles


def test_the_page_has_every_operation():
    assert operations_of(PAGE.read_text()) == [
        *lax_operations.OPERATIONS,
        *lax_operations.SCALARS,
    ]


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_other_elements_are_refused(dtype):
    x = np.zeros(32, dtype)
    operations = lax_operations.kernel_of(["add"], dtype, "tpu7x")
    with pytest.raises(errors.PallasGpuError):
        emitted.lowered(operations, x, x)


def test_narrow_vectors_are_refused_under_the_compact_tiling():
    def body(x_ref, o_ref, x_vmem):
        plsc.sync_copy(x_ref, x_vmem)
        x_vmem[...] = x_vmem[...] + x_vmem[...]
        plsc.sync_copy(x_vmem, o_ref)

    x = np.zeros(32, jnp.bfloat16)
    scratch = plsc.VMEM((32,), jnp.bfloat16)
    emitted.lowered(kernel(body, x, scratch, subcores=1, tiling="sparsecore"), x)
    with pytest.raises(errors.UnsupportedError, match="compact tiling"):
        emitted.lowered(kernel(body, x, scratch, subcores=1), x)
