# SPDX-License-Identifier: Apache-2.0
"""Modules of Blackwell's tensor core that lack or change one thing are found out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

import pallas_gpu as plgpu
from pallas_gpu.emitters import module
from pallas_gpu.emitters.tensor_cores import pairs
from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.engine import DeadlockError
from tests.support.lockstep import faults
from tests.support.scaled_products import E2M1, ScaledProduct
from tests.support.semantics import under
from tests.support.sparse_pairs import SparseTile
from tests.support.sparse_products import SparseProduct
from tests.support.tensor_pairs import PairProduct
from tests.support.tensor_products import BLACKWELL, E4M3, F32, Product, start_copies

NATIVE = plgpu.Layout.TCGEN05_TMEM_NATIVE(2)


class Added(Product):
    """One warpgroup stores an accumulator, another one adds a product to it."""

    def body(self, a, b, out, a_smem, b_smem, acc, loaded, done, stored):
        @plgpu.when(lax.axis_index("wg") == 0)
        def _():
            ones = plgpu.layout_cast(jnp.ones((128, 16), F32), NATIVE)
            plgpu.async_store_tmem(acc, ones)
            plgpu.commit_tmem()
            plgpu.barrier_arrive(stored)

        @plgpu.when(lax.axis_index("wg") == 1)
        def _():
            start_copies(loaded, (a, a_smem), (b, b_smem))
            plgpu.barrier_wait(loaded)
            plgpu.barrier_wait(stored)
            plgpu.tcgen05_mma(acc, a_smem, b_smem.T, done)
            plgpu.barrier_wait(done)
            out[...] = plgpu.async_load_tmem(acc)

    def make(self):
        stored = plgpu.Barrier(orders_tensor_core=True)
        return super().make(num_threads=2, thread_name="wg", stored=stored)

    def expected(self, a, b):
        return super().expected(a, b) + 1


NVF4 = SparseProduct(a=E2M1, b=E2M1, n=16, k=256, a_swizzle=64)
CASES = {
    "one": Added(n=16, k=32, b_stored=True, swizzle=64),
    "scaled": ScaledProduct(n=136, k=256),
    "sparse": SparseProduct(n=16, k=256),
    "sparse, 64 rows": SparseProduct(m=64, n=16, k=256),
    "tf32": SparseProduct(a=F32, b=F32, n=16, k=64),
    "nvf4": SparseTile(NVF4, 1, True, E4M3, 32),
    "pair": PairProduct(n=32, k=32, swizzle=64, tracked=False),
    "64 rows": PairProduct(m=64, n=32, k=32, swizzle=64, tracked=False),
}


def prepare(case):
    """What runs the kernel of a case with a fault, and the right result."""
    operands = case.operands()
    lane = under(plgpu.LoweringSemantics.Lane, case.make())
    return faults.prepared(lane, operands), case.expected(*operands)


@functools.cache
def prepared(name):
    return prepare(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_without_a_fault_the_kernels_are_right(name):
    run, expected = prepared(name)
    np.testing.assert_array_equal(run(), expected)


def of_one_cta(name):
    """An operation has cta_group::1."""

    def fault(found: ir.Module) -> None:
        for op in faults._operations(found, name):
            op.attributes["group"] = ir.Attribute.parse("#nvvm.cta_group<cta_1>")

    return fault


def last_barrier(found: ir.Module) -> None:
    for x in ("arrive", "wait"):
        faults.drop(f"nvvm.cluster.{x}", -1)(found)


drop, edit = faults.drop, faults.edit_text
FENCE, WAIT = "nvvm.tcgen05.fence", "nvvm.tcgen05.wait"
# By case what is missing, and what the report says.
MISSING = {
    "one": {
        # Of the fences: two in commit_tmem, one before the arrival, one after each
        # wait, two around the barrier before TMEM is freed.
        "the fence after the wait for the stores": (drop(FENCE, 3), "fence"),
        "all fences": (drop(FENCE), "fence"),
        "the fence after the wait for the product": (drop(FENCE, 4), "fence"),
        "the wait for the stores": (drop(WAIT, 0), "still being written"),
        "the wait for the loads": (drop(WAIT, 1), "still being read"),
        "the deallocation": (drop("nvvm.tcgen05.dealloc"), "has not freed its TMEM"),
        "the allocation": (drop("nvvm.tcgen05.alloc"), "TMEM lanes"),
        "the commit": (drop("nvvm.tcgen05.commit"), "deadlock"),
        "the version of a descriptor": (
            edit(r"add\.u64 b, \$2, 0", "add.u64 b, $2, 70368744177664"), "bits 46-48",
        ),
        "the columns of the accumulator": (
            edit(r"add\.u32 d, \$0, 0", "add.u32 d, $0, 32"), "not allocated",
        ),
    },
    "scaled": {
        "the multicast": (
            edit(r"32x128b\.warpx4", "128x128b"), "out of bounds of the SMEM",
        ),
        "a scale id of 2X": (
            edit("kind::mxf8f6f4", "kind::mxf4"), "no such scale_vec::1X",
        ),
        "the type of the scales": (
            edit(r"add\.u32 i, \$3, 0", "add.u32 i, $3, 8388608"),
            "no such scale_vec::1X",
        ),
        "the columns of the scales": (
            edit(r"add\.u32 sa, \$5, 4", "add.u32 sa, $5, 300"), "not allocated",
        ),
        "the columns of the copies": (
            edit(r"add\.u32 d, \$0, 12", "add.u32 d, $0, 300"), "not allocated",
        ),
        "the lane of the scales": (
            edit(r"add\.u32 sb, \$6, 0", "add.u32 sb, $6, 2097152"),
            "scales from lane 32 on",
        ),
        "the lane of the copies": (
            edit(r"add\.u32 d, \$0, 12", "add.u32 d, $0, 2097152"),
            "tcgen05.cp to lane 32",
        ),
    },
    "sparse": {
        "the copies": (faults.drop_text(r"tcgen05\.cp"), "does not define"),
        "the place of a copy": (
            edit(r"add\.u32 d, \$0, 4;(?= tcgen05\.cp)", "add.u32 d, $0, 200;"),
            "not allocated",
        ),
        "the mnemonic": (edit(r"mma\.sp", "mma"), "sparsity of"),
        "an odd column": (
            edit(r"add\.u32 m, \$5, 2;", "add.u32 m, $5, 1;"), "column",
        ),
        "the columns": (
            edit(r"add\.u32 m, \$5, 2;", "add.u32 m, $5, 64;"), "not allocated",
        ),
    },
    "sparse, 64 rows": {
        # 1048576 is lane 16: that of the right half of N.
        "the lane": (
            edit(r"add\.u32 m, \$5, 1048576;", "add.u32 m, $5, 0;"), "from lane 0",
        ),
        "the lane of the left half": (
            edit(r"add\.u32 m, \$5, 0;", "add.u32 m, $5, 1048576;"), "from lane 16",
        ),
    },
    "pair": {
        "the fence after the wait for the product": (drop(FENCE, 0), "fence"),
        "the group of the products": (
            edit("cta_group::2", "cta_group::1"), "no tcgen05.mma is",
        ),
        "the group of the commit": (of_one_cta("nvvm.tcgen05.commit"), "after ::2"),
        "the group of the allocation": (of_one_cta("nvvm.tcgen05.alloc"), "after ::1"),
        "the deallocation": (drop("nvvm.tcgen05.dealloc"), "has not freed its TMEM"),
        "the barrier before the deallocation": (last_barrier, "TMEM"),
        # The barrier of the cluster alone does not order tcgen05 instructions.
        "the wait for the loads before the deallocation": (drop(WAIT), "TMEM"),
        "the wait of the leader for the other": (
            faults.drop_text(r"mbarrier\.try_wait\.parity\.acquire\.cluster"), "SMEM",
        ),
        "the commit": (drop("nvvm.tcgen05.commit"), "deadlock"),
    },
}  # fmt: skip


def rows(table):
    return [
        pytest.param(case, *(row if isinstance(row, tuple) else (row,)),
                     id=f"{case}: {name}")
        for case, faulty in table.items()
        for name, row in faulty.items()
    ]  # fmt: skip


@pytest.mark.parametrize(("case", "fault", "text"), rows(MISSING))
def test_what_is_missing_is_reported(case, fault, text):
    with pytest.raises(PtxError, match=text):
        prepared(case)[0](fault)


BOTH_IDS = rf"add\.u32 i, \$3, {1 << 29 | 1 << 4};"
K_STEPS = {
    "a's K step": edit(r"add\.u64 a, \$1, 2;", "add.u64 a, $1, 0;"),
    "b's K step": edit(r"add\.u64 b, \$2, 2;", "add.u64 b, $2, 0;"),
}
CHANGED = {
    "one": {
        **K_STEPS,
        "the shape of the stores": edit(r"32x32b\.x16", "16x256b.x4"),
        "accumulate": edit(r"setp\.ne\.b32 first", "setp.eq.b32 first"),
    },
    "scaled": {
        "the id of a's scales": edit(BOTH_IDS, f"add.u32 i, $3, {1 << 4};"),
        "the id of b's scales": edit(BOTH_IDS, f"add.u32 i, $3, {1 << 29};"),
        "the copy of a's scales": faults.drop_text(r"tcgen05\.cp", 0),
        "the copy of b's scales": faults.drop_text(r"tcgen05\.cp", 1),
        "columns of a's scales": edit(r"add\.u32 sa, \$5, 4;", "add.u32 sa, $5, 0;"),
        "columns of b's scales": edit(r"add\.u32 sb, \$6, 8;", "add.u32 sb, $6, 0;"),
        **{
            f"the place of tile {tile}": edit(
                rf"add\.u32 d, \$0, {tile};(?= tcgen05\.cp)",
                f"add.u32 d, $0, {12 - tile};",
            )
            for tile in (4, 8)
        },
    },
    "sparse": {
        "the selector": edit(r"add\.u32 i, \$3, 1;", "add.u32 i, $3, 0;"),
        "the column": edit(r"add\.u32 m, \$5, 2;", "add.u32 m, $5, 0;"),
        "a's K step": K_STEPS["a's K step"],
        "b's K step": edit(r"add\.u64 b, \$2, 4;", "add.u64 b, $2, 2;"),
        "the source of a copy": edit(r"add\.u64 s, \$1, 128;", "add.u64 s, $1, 0;"),
    },
    "sparse, 64 rows": {
        "the selector": edit(
            r"add\.u32 i, \$3, 1;(?= add\.u32 m, \$5, 1048576)", "add.u32 i, $3, 0;"
        ),
        "the column": edit(r"add\.u32 m, \$5, 1048578;", "add.u32 m, $5, 1048576;"),
        "the source of a copy": edit(r"add\.u64 s, \$1, 128;", "add.u64 s, $1, 0;"),
    },
    # Other groups: 1:2, and two of four pairs with scales of blocks.
    "tf32": {
        "the selector": edit(r"add\.u32 i, \$3, 1;", "add.u32 i, $3, 0;"),
        "the column": edit(r"add\.u32 m, \$5, 2;", "add.u32 m, $5, 0;"),
        "a's K step": K_STEPS["a's K step"],
    },
    "nvf4": {
        "the column": edit(r"add\.u32 m, \$7, 2;", "add.u32 m, $7, 0;"),
        "b's K step": edit(r"add\.u64 b, \$2, 4;", "add.u64 b, $2, 0;"),
        "scales of a": edit(r"add\.u32 sa, \$5, 4;", "add.u32 sa, $5, 0;"),
    },
    "pair": K_STEPS,
}


@pytest.mark.parametrize(("case", "fault"), rows(CHANGED))
def test_what_is_changed_changes_the_result(case, fault):
    run, expected = prepared(case)
    assert (run(fault) != expected).any()


# --- mutants of the emitters of pairs -------------------------------------------------


def test_the_other_cta_must_not_issue(monkeypatch):
    monkeypatch.setattr(pairs, "issuer", lambda _: module.current().elected)
    with pytest.raises(PtxError, match=r"still being written|more arrivals"):
        prepare(CASES["pair"])[0]()


@pytest.mark.parametrize(
    ("mask", "text"),
    [(0b01, "deadlock"), (0b10, "deadlock"), (0b110, "to no CTA of the cluster")],
)
def test_a_commit_arrives_in_both_ctas(mask, text, monkeypatch):
    def other():
        return arith.constant(ir.IntegerType.get_signless(16), mask)

    monkeypatch.setattr(pairs, "mask", other)
    with pytest.raises(PtxError, match=text):
        prepare(CASES["pair"])[0]()


def test_pairs_of_a_cluster_are_of_adjacent_ranks(monkeypatch):
    """The leaders of a cluster of two pairs have the ranks 0 and 2."""
    case = PairProduct(m=64, n=32, k=32, swizzle=64)
    operands = case.operands()

    def body(a, b, out, a_smem, b_smem, acc, loaded, ready, done):
        p, c = lax.axis_index("p"), lax.axis_index("c")
        case.load(a, b, a_smem, b_smem, loaded, ready)
        plgpu.tcgen05_mma(
            acc, a_smem, b_smem.T, done, accumulate=False, collective_axis="c"
        )
        plgpu.barrier_wait(done)
        out[p, plgpu.ds(c * case.m, case.m)] = acc[...]

    def run_pairs():
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((2, 2 * case.m, case.n), F32),
            scratch_types=case.scratch(),
            compiler_params=BLACKWELL,
            cluster=(2, 2),
            cluster_names=("p", "c"),
        )
        return faults.run(under(plgpu.LoweringSemantics.Lane, kernel), operands)

    np.testing.assert_array_equal(run_pairs(), [case.expected(*operands)] * 2)
    monkeypatch.setattr(pairs, "_ctas", lambda: 2)
    with pytest.raises((DeadlockError, PtxError)):
        run_pairs()
