# SPDX-License-Identifier: Apache-2.0
"""Every view of a reference, in both directions of a copy: it works, or is refused.

What the emulator runs the compiler lowers, and a refusal has a type of ours and comes
when the kernel is traced.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.positions import Positions
from tests.support.semantics import BOTH

F32, I32, BF16 = jnp.float32, jnp.int32, jnp.bfloat16
ROWS = (9, 2, 14, 5, 0, 7, 12, 3)

# A view of float32[16, 64] in GMEM, and its shape.
VIEWS = {
    "all": (lambda x: x, (16, 64)),
    "slice": (lambda x: x.at[8:16], (8, 64)),
    "columns": (lambda x: x.at[:, 16:48], (16, 32)),
    "integer": (lambda x: x.at[3], (64,)),
    "odd columns": (lambda x: x.at[:, 3:35], (16, 32)),
    "stride": (lambda x: x.at[::2], (8, 64)),
    "stride of columns": (lambda x: x.at[:, ::2], (16, 32)),
    "transposed": (lambda x: x.T, (64, 16)),
    "transposed slice": (lambda x: x.at[:, 0:32].T, (32, 16)),
    "reshaped": (lambda x: x.reshape(4, 4, 64), (4, 4, 64)),
    "reshaped flat": (lambda x: x.reshape(1024), (1024,)),
    "reshaped columns": (lambda x: x.at[:, 0:32].reshape(512), (512,)),
    "reshaped, then indexed": (lambda x: x.reshape(4, 4, 64).at[:, 1], (4, 64)),
    "reshaped, then transposed": (
        lambda x: x.reshape(4, 4, 64).transpose((1, 0, 2)), (4, 4, 64),
    ),
    "transposed, then reshaped": (lambda x: x.T.reshape(1024), (1024,)),
    "bitcast": (lambda x: x.bitcast(I32), (16, 64)),
    "bitcast to wider": (lambda x: x.bitcast(jnp.int16).bitcast(I32), (16, 64)),
    "bitcast and reshaped": (lambda x: x.bitcast(I32).reshape(8, 128), (8, 128)),
    "transposed, bitcast, indexed": (
        lambda x: x.bitcast(jnp.int16).T.bitcast(I32).at[0:8], (8, 8),
    ),
    "rows by an array": (lambda x: x.at[np.array(ROWS)], (8, 64)),
    "rows of a reshaped": (
        lambda x: x.reshape(32, 32).at[np.array(ROWS)], (8, 32),
    ),
    "columns by an array": (lambda x: x.at[:, np.array(ROWS)], (16, 8)),
    "a new axis": (lambda x: x.at[:, None], (16, 1, 64)),
}  # fmt: skip
REFUSED = {
    "stride": (errors.UnsupportedError, "a slice of a reference has a stride"),
    "stride of columns": (
        errors.UnsupportedError, "a slice of a reference has a stride",
    ),
    "transposed, bitcast, indexed": (
        errors.UnsupportedError, "elements are not adjacent along the last dimension",
    ),
    "columns by an array": (
        errors.UnsupportedError, "these indices do not name rows",
    ),
}  # fmt: skip
REFUSED_IN_SMEM = {
    **REFUSED,
    "rows by an array": (errors.UnsupportedError, "is indexed with an array"),
    "rows of a reshaped": (errors.UnsupportedError, "is indexed with an array"),
    "columns by an array": (errors.UnsupportedError, "is indexed with an array"),
}


def cell(name, load, in_smem):
    """A copy of a view to an array of its own shape, or of such an array to the view.

    Args:
      name: of the view.
      load: whether the copy is from GMEM to SMEM.
      in_smem: whether the view is that of the array in SMEM.
    """
    view, shape = VIEWS[name]
    dtype = I32 if "bitcast" in name else F32
    from_view = load != in_smem
    x = np.arange(1024 if from_view else np.prod(shape)).astype(
        F32 if from_view else dtype
    )
    x = x.reshape((16, 64) if from_view else shape)
    sides = (((16, 64), F32), (shape, dtype))
    near = sides[0 if in_smem else 1]
    result = (shape, dtype) if from_view else ((16, 64), F32)

    def body(x, o, *refs):
        smem, full = refs
        if load:
            src, dst = (x, view(smem)) if in_smem else (view(x), smem)
            if in_smem:
                smem[...] = jnp.zeros((16, 64), F32)
                plgpu.commit_smem()
            plgpu.copy_gmem_to_smem(src, dst, full)
            plgpu.barrier_wait(full)
            o[...] = smem[...]
            return
        smem[...] = x[...]
        plgpu.commit_smem()
        if not in_smem:
            o[...] = jnp.zeros((16, 64), F32)
            plgpu.commit_gmem()
        src, dst = (view(smem), o) if in_smem else (smem, view(o))
        plgpu.copy_smem_to_gmem(src, dst)
        plgpu.wait_smem_to_gmem(0)

    make = everywhere.kernel(
        body, jax.ShapeDtypeStruct(*result), plgpu.SMEM(*near), plgpu.Barrier()
    )

    return make, x, from_view


def expected_of(name, x, from_view):
    view = VIEWS[name][0]
    places = view(Positions.of(np.zeros((16, 64), F32))).starts // 4
    if from_view:
        return x.reshape(-1)[places].view(I32 if "bitcast" in name else F32)
    result = np.zeros((16, 64), F32)
    result.reshape(-1)[places] = x.view(F32)
    return result


CELLS = [
    (name, load, in_smem)
    for in_smem in (False, True)
    for load in (True, False)
    for name in VIEWS
]


@pytest.mark.parametrize(("name", "load", "in_smem"), CELLS)
def test_a_view_is_copied_or_refused(name, load, in_smem):
    make, x, from_view = cell(name, load, in_smem)
    refusal = (REFUSED_IN_SMEM if in_smem else REFUSED).get(name)
    if refusal is not None:
        error, what = refusal
        with pytest.raises(error, match=what):
            jax.make_jaxpr(make())(x)
        return
    everywhere.check(make, [x], expected_of(name, x, from_view))


@everywhere.gives(
    [np.arange(1024, dtype=F32).reshape(16, 64)],
    lambda x: np.ascontiguousarray(x.view(np.int16).T).view(np.int32),
    plgpu.SMEM((128, 8), I32),
    plgpu.Barrier(),
)
def test_what_has_no_window_is_copied_to_the_inverse_of_the_other_side(
    x, o, smem, full
):
    plgpu.copy_gmem_to_smem(x.bitcast(jnp.int16).T.bitcast(I32), smem, full)
    plgpu.barrier_wait(full)
    o[...] = smem[...]


SAMPLE = [("reshaped, then indexed", True, False), ("columns", True, True)]


@pytest.mark.offline
@pytest.mark.parametrize(("name", "load", "in_smem"), SAMPLE)
def test_it_compiles_offline(name, load, in_smem):
    make, x, _ = cell(name, load, in_smem)
    (report,) = plgpu.offline.compile(make(), x)
    assert report.resources.spill_store_bytes == 0


# --- beside products, whose tiles the compiler chooses --------------------------------


def numbers(shape):
    x = np.arange(np.prod(shape)).reshape(shape) % 113
    return np.asarray(jnp.asarray(x, BF16))


def product_of_a_reshaped_operand(shape, interpret=None):
    def body(x, y, o, a, b, full):
        plgpu.copy_gmem_to_smem(x, a.reshape(shape), full)
        plgpu.copy_gmem_to_smem(y, b, full)
        plgpu.barrier_wait(full)

        def multiply(acc):
            plgpu.wgmma(acc, a.at[0], b)
            return acc[...]

        o[...] = plgpu.run_scoped(multiply, plgpu.ACC((64, 64)))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), F32),
        scratch_types=[
            plgpu.SMEM((2, 64, 64), BF16),
            plgpu.SMEM((64, 64), BF16),
            plgpu.Barrier(num_arrivals=2),
        ],
        interpret=interpret,
    )


def test_rows_are_merged_in_tiles_that_the_compiler_chooses():
    x, y = numbers((128, 64)), np.asarray(jnp.eye(64, dtype=BF16))

    def make(interpret):
        return product_of_a_reshaped_operand((128, 64), interpret)

    semantics = [BOTH[1]]  # Lane has no layouts but the author's
    everywhere.check(make, [x, y], x[:64].astype(np.float32), semantics=semantics)


def test_an_operand_of_a_product_is_not_flat():
    """The emulator, which chooses no tiles, refuses it as the compiler does."""
    x, y = numbers((8192,)), np.asarray(jnp.eye(64, dtype=BF16))
    what = "need different layouts of one SMEM array"
    for interpret in (None, True):
        kernel = product_of_a_reshaped_operand((8192,), interpret)
        with pytest.raises(errors.LayoutError, match=what):
            plgpu.offline.lower(kernel, x, y) if interpret is None else kernel(x, y)
