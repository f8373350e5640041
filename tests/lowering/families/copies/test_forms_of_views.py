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
from tests.support.host import counted
from tests.support.refusal import refused
from tests.support.round_trips import Positions
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
    "rows of a reshaped": (lambda x: x.reshape(32, 32).at[np.array(ROWS)], (8, 32)),
    "columns by an array": (lambda x: x.at[:, np.array(ROWS)], (16, 8)),
    "a new axis": (lambda x: x.at[:, None], (16, 1, 64)),
}  # fmt: skip
STRIDE = "a slice of a reference has a stride"
REFUSED = {
    "stride": STRIDE,
    "stride of columns": STRIDE,
    "transposed, bitcast, indexed": "not adjacent along the last dimension",
    "columns by an array": "these indices do not name rows",
}
BY_AN_ARRAY = ("rows by an array", "rows of a reshaped", "columns by an array")
REFUSED_IN_SMEM = REFUSED | dict.fromkeys(BY_AN_ARRAY, "is indexed with an array")


def cell(name, load, in_smem):
    """A copy of a view to an array of its own shape, or of such an array to the view.

    Args:
      name: of the view.
      load: whether the copy is from GMEM to SMEM.
      in_smem: whether the view is that of the array in SMEM.
    """
    view, shape = VIEWS[name]
    whole, part = np.zeros((16, 64), F32), np.zeros(shape, I32)
    if "bitcast" not in name:
        part = part.astype(F32)
    from_view = load != in_smem
    given, expected = (whole, part) if from_view else (part, whole)
    x = np.arange(given.size).astype(given.dtype).reshape(given.shape)
    if name not in (REFUSED_IN_SMEM if in_smem else REFUSED):
        places = view(Positions.of(whole)), Positions.of(part)
        first, second = places if from_view else places[::-1]
        first.copy(x, second, expected)

    def body(x, o, smem, full):
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

    near = whole if in_smem else part
    smem = plgpu.SMEM(near.shape, near.dtype)
    return everywhere.kernel(body, expected, smem, plgpu.Barrier()), [x], expected


CELLS = [
    (name, load, in_smem)
    for in_smem in (False, True)
    for load in (True, False)
    for name in VIEWS
]


@pytest.mark.parametrize(("name", "load", "in_smem"), CELLS)
def test_a_view_is_copied_or_refused(name, load, in_smem):
    make, args, expected = cell(name, load, in_smem)
    refusal = (REFUSED_IN_SMEM if in_smem else REFUSED).get(name)
    if refusal is None:
        everywhere.check(make, args, expected)
        return
    with pytest.raises(errors.UnsupportedError, match=refusal):
        jax.make_jaxpr(make())(*args)


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
    make, args, _ = cell(name, load, in_smem)
    (report,) = plgpu.offline.compile(make(), *args)
    assert report.resources.spill_store_bytes == 0


# --- beside products, whose tiles the compiler chooses --------------------------------


Y = np.eye(64, dtype=BF16)


def product_of_a_reshaped_operand(shape):
    def body(x, y, o, a, b, full):
        plgpu.copy_gmem_to_smem(x, a.reshape(shape), full)
        plgpu.copy_gmem_to_smem(y, b, full)
        plgpu.barrier_wait(full)

        def multiply(acc):
            plgpu.wgmma(acc, a.at[0], b)
            return acc[...]

        o[...] = plgpu.run_scoped(multiply, plgpu.ACC((64, 64)))

    x = counted(shape, BF16)
    expected = x.reshape(128, 64)[:64].astype(F32)
    tiles = plgpu.SMEM((2, 64, 64), BF16), plgpu.SMEM((64, 64), BF16)
    full = plgpu.Barrier(num_arrivals=2)
    return everywhere.kernel(body, expected, *tiles, full), [x, Y], expected


def test_rows_are_merged_in_tiles_that_the_compiler_chooses():
    semantics = [BOTH[1]]  # Lane has no layouts but the author's
    everywhere.check(*product_of_a_reshaped_operand((128, 64)), semantics=semantics)


@pytest.mark.parametrize("emulated", [False, True])
@refused
def test_an_operand_of_a_product_is_not_flat(emulated):
    """The emulator, which chooses no tiles, refuses it as the compiler does."""
    make, args, _ = product_of_a_reshaped_operand((8192,))
    if emulated:
        make(True)(*args)
    else:
        plgpu.offline.lower(make(), *args)
