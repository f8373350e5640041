# SPDX-License-Identifier: Apache-2.0
"""Inline code: emulated by its author's function, as emitted code, on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

import pallas_gpu as plgpu
from pallas_gpu import mosaic as mgpu
from pallas_gpu import offline
from tests.support import everywhere
from tests.support import public_calls as calls
from tests.support.features.row import Row
from tests.support.inline_code import (
    F32,
    I32,
    OUT,
    SHAPE,
    SPLAT,
    STRIDED,
    TILED,
    WGMMA,
    X,
    array,
    double,
    emulated_double,
    loaded,
)

BF16 = jnp.bfloat16
REF = plgpu.RefType()
TCGEN05 = plgpu.Layout.TCGEN05


_WARPGROUP = plgpu.LoweringSemantics.Warpgroup
INFERRED = {
    "compiler_params": plgpu.CompilerParams(lowering_semantics=_WARPGROUP),
    "semantics": [_WARPGROUP],
    "executed": [_WARPGROUP],
}


def index(x):
    """A number, or a scalar that inline code is given, as an index of a memref."""
    if isinstance(x, int):
        return arith.constant(ir.IndexType.get(), x)
    return arith.index_cast(ir.IndexType.get(), x.registers.item())


def seven():
    return mgpu.c(7.0, ir.F32Type.get())


# --- arrays and scalars ---------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("emulate", [None, lambda x, y, n: x * y + n])
@pytest.mark.parametrize("layout", [STRIDED, WGMMA, plgpu.Layout.WG_STRIDED(SHAPE, 1)])
def test_arrays_and_scalars_go_in_and_arrays_come_out(layout, emulate):
    def body(x, y, o):
        @plgpu.inline_mgpu(
            arg_types=(layout, layout, SPLAT),
            return_type=array(layout),
            emulate=emulate,
        )
        def fused(ctx, x, y, n):
            return x * y + n

        o[...] = fused(loaded(x, layout), loaded(y, layout), x[0, 1])

    everywhere.run(body, [X, X.T.reshape(SHAPE)], X * X.T.reshape(SHAPE) + X[0, 1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool"])
def test_elements_of_all_types_keep_their_type(dtype):
    x = (X % 7 > 3) if dtype == "bool" else np.abs(X).astype(jnp.dtype(dtype))

    def body(x, o):
        @plgpu.inline_mgpu(arg_types=(STRIDED,), return_type=array(dtype=dtype))
        def same(ctx, x):
            return x

        o[...] = same(loaded(x))

    everywhere.run(body, [x], x)


def test_results_are_a_pytree():
    def body(x, o, n):
        @plgpu.inline_mgpu(
            arg_types=({"x": STRIDED, "n": [SPLAT]},),
            return_type={"sum": array(), "rest": (array(SPLAT, (), I32), array(SPLAT))},
            emulate=lambda a: {
                "sum": a["x"] + a["x"],
                "rest": (a["n"][0], np.full(SHAPE, 7, np.float32)),
            },
        )
        def several(ctx, args):
            (number,) = args["n"]
            splat = mgpu.FragmentedArray.splat(seven(), SHAPE)
            return {"sum": args["x"] + args["x"], "rest": (number, splat)}

        found = several({"x": loaded(x), "n": [jnp.int32(5)]})
        number, splat = found["rest"]
        o[...] = found["sum"] + splat
        n[0] = number

    everywhere.run(body, [X], [2 * X + 7, np.array([5], np.int32)])


def test_a_scalar_may_be_returned_as_a_value_of_mlir():
    def body(x, o):
        @plgpu.inline_mgpu(arg_types=(REF,), return_type=array(SPLAT, ()))
        def first(ctx, x):
            return memref.load(x, [index(0), index(3)])

        o[...] = loaded(x) + first(x)

    everywhere.run(body, [X], X + X[0, 3])


def test_a_splat_may_be_declared_as_one():
    def body(x, o):
        @plgpu.inline_mgpu(arg_types=(SPLAT,), return_type=array())
        def wide(ctx, n):
            assert isinstance(n.layout, mgpu.WGSplatFragLayout)
            return n.to_layout(STRIDED)

        o[...] = wide(jnp.full(SHAPE, 3.0)) + loaded(x)

    everywhere.run(body, [X], X + 3)


def test_to_mgpu_is_the_layout_of_the_handles():
    seen = []

    def body(x, o):
        @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=array(WGMMA))
        def look(ctx, x):
            seen.append(x.layout)
            return x

        o[...] = look(loaded(x, WGMMA))

    everywhere.run(body, [X], X)
    assert set(seen) == {WGMMA.to_mgpu()} == {mgpu.WGMMA_LAYOUT}
    strided = plgpu.Layout.WG_STRIDED.to_mgpu(SHAPE, vec_size=2)
    assert strided == STRIDED.to_mgpu() == mgpu.WGStridedFragLayout(SHAPE, 2)


# --- references -----------------------------------------------------------------------


def test_references_to_gmem_are_read_and_written():
    def body(x, o):
        @plgpu.inline_mgpu(
            arg_types=(REF, REF), emulate=lambda x, o: o.__setitem__(..., x[...] + 1)
        )
        def add_one(ctx, x, o):
            x = mgpu.FragmentedArray.load_strided(x)
            (x + 1.0).store_untiled(o)

        add_one(x, o)

    everywhere.run(body, [X], X + 1)


# A part of a reference of shape (2, 64, 128), and the same part of an array of NumPy.
PARTS = {
    "index": (lambda r, k: r.at[k], lambda a: a[1]),
    "rows": (lambda r, k: r.at[0, plgpu.ds(k * 8, 32)], lambda a: a[0, 8:40]),
    "tiles": (lambda r, k: r.at[1, 16:32, 32:96], lambda a: a[1, 16:32, 32:96]),
}


@pytest.mark.parametrize("transforms", [(), TILED], ids=["plain", "tiled"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_smem_is_a_memref_of_its_tiled_shape(part, transforms):
    select, expected = PARTS[part]
    x = np.stack([X, X[::-1]])

    def body(x, k, o, smem):
        smem[...] = x[...]

        def emulate(part):
            assert part.shape == o.shape
            return part[...]

        layout = plgpu.Layout.WG_STRIDED(o.shape, vec_size=1)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(transforms),),
            return_type=array(layout, o.shape),
            emulate=emulate,
        )
        def read(ctx, part):
            shape = tuple(ir.MemRefType(part.type).shape)
            m, n = o.shape
            assert shape == ((m // 8, n // 32, 8, 32) if transforms else (m, n))

            def element(i, j):
                if not transforms:
                    return memref.load(part, [i, j])
                eight, words = index(8), index(32)
                row, column = arith.remui(i, eight), arith.remui(j, words)
                # 16-byte chunks of the rows of a tile are swizzled.
                chunk = arith.xori(arith.divui(column, index(4)), row)
                column = arith.addi(
                    arith.muli(chunk, index(4)), arith.remui(column, index(4))
                )
                place = [arith.divui(i, eight), arith.divui(j, words), row, column]
                return memref.load(part, place)

            return mgpu.FragmentedArray.build(o.shape, layout, element)

        o[...] = read(select(smem, k[0]))

    want = expected(x)
    smem = plgpu.SMEM(x.shape, F32, transforms=transforms)
    everywhere.run(body, [x, np.array([1], np.int32)], want, smem)


def test_code_is_ordered_with_the_accesses_around_it():
    """Each thread reads what others have stored before, and stores what they read."""

    def emulate(smem):
        smem[...] = smem[::1][::-1]

    def body(x, o, smem):
        smem[...] = loaded(x)

        @plgpu.inline_mgpu(arg_types=(REF,), emulate=emulate)
        def turn(ctx, smem):
            layout = plgpu.Layout.WG_STRIDED(SHAPE, vec_size=1)
            x = mgpu.FragmentedArray.build(
                SHAPE,
                layout,
                lambda i, j: memref.load(smem, [arith.subi(index(63), i), j]),
            )
            mgpu.warpgroup_barrier()
            x.store_untiled(smem)

        turn(smem)
        o[...] = loaded(smem)

    everywhere.run(body, [X], X[::-1], plgpu.SMEM(SHAPE, F32))


def test_smem_has_the_transforms_that_code_declares_under_warpgroup():
    def body(x, o, smem):
        smem[...] = x[...]

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TILED),), return_type=array(WGMMA))
        def read(ctx, smem):
            return mgpu.FragmentedArray.load_tiled(
                smem, swizzle=128, layout=mgpu.WGMMA_LAYOUT
            )

        o[...] = read(smem)

    everywhere.run(body, [X], X, plgpu.SMEM(SHAPE, F32), **INFERRED)


# --- barriers -------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_waits_in_code_and_in_the_kernel_alternate(several):
    """A barrier's phase is counted wherever it is waited for."""
    x = np.stack([X + i for i in range(6)])

    @plgpu.inline_mgpu(arg_types=(REF,))
    def wait(ctx, barrier):
        assert isinstance(barrier, mgpu.BarrierRef)
        (barrier[1] if several else barrier).wait()

    def body(x, o, smem, barriers):
        total = jnp.zeros(SHAPE, F32)
        one = barriers.at[1]

        def step(i, total):
            plgpu.copy_gmem_to_smem(x.at[2 * i], smem, one)
            wait(barriers if several else one)
            total = total + loaded(smem)
            plgpu.copy_gmem_to_smem(x.at[2 * i + 1], smem, one)
            plgpu.barrier_wait(one)
            return total + loaded(smem)

        o[...] = lax.fori_loop(0, 3, step, total)

    scratch = [plgpu.SMEM(SHAPE, F32), plgpu.Barrier(num_barriers=2)]
    everywhere.run(body, [x], x.sum(0), *scratch)


def test_a_barrier_at_a_dynamic_index_is_waited_for():
    @plgpu.inline_mgpu(arg_types=(REF,))
    def wait(ctx, barrier):
        barrier.wait()

    def body(x, o, smem, barriers):
        def step(i, total):
            one = barriers.at[i % 2]
            plgpu.copy_gmem_to_smem(x, smem, one)
            wait(one)
            return total + loaded(smem)

        o[...] = lax.fori_loop(0, 5, step, jnp.zeros(SHAPE, F32))

    scratch = [plgpu.SMEM(SHAPE, F32), plgpu.Barrier(num_barriers=2)]
    everywhere.run(body, [X], 5 * X, *scratch)


def test_tmem_is_a_reference_with_its_layout():
    def body(x, o, tmem):
        plgpu.async_store_tmem(tmem, loaded(x, TCGEN05))
        plgpu.commit_tmem()

        @plgpu.inline_mgpu(arg_types=(REF,), return_type=array(TCGEN05, (128, 128)))
        def read(ctx, tmem):
            assert isinstance(tmem, mgpu.tcgen05.TMEMRef)
            found = tmem.load(TCGEN05.to_mgpu())
            mgpu.tcgen05.wait_load_tmem()
            return found

        o[...] = read(tmem)

    x = np.concatenate([X, X + 1])
    tmem = plgpu.TMEM((128, 128), F32)
    everywhere.run(body, [x], x, tmem, target="sm_100a", on_gpu=False)


# --- where it is called ---------------------------------------------------------------


@pytest.mark.parametrize("emulate", [True, None])
def test_the_function_captures_scalars(emulate):
    def body(x, o):
        o[...] = jnp.zeros(SHAPE, F32)

        def step(i, _):
            one = (i + 1 - i).astype(F32)

            @plgpu.inline_mgpu(
                arg_types=(STRIDED, REF),
                return_type=array(shape=o.shape),
                emulate=emulate and (lambda total, x: total + x[...]),
            )
            def add(ctx, total, ref):
                assert x.shape == o.shape == SHAPE
                return total + mgpu.FragmentedArray.load_strided(ref, vec_size=2) * one

            o[...] = add(loaded(o), x)
            return ()

        lax.fori_loop(0, 3, step, ())

    everywhere.run(body, [X], 3 * X)


@pytest.mark.parametrize("call", [double, emulated_double])
def test_code_runs_in_branches_and_loops(call):
    def body(x, o):
        def step(i, total):
            return lax.cond(i % 2 == 0, call, lambda t: t + 1, total)

        o[...] = lax.fori_loop(0, 4, step, loaded(x))

    everywhere.run(body, [X], (2 * X + 1) * 2 + 1)


def test_a_warp_runs_code_with_scalars_and_references():
    def body(x, o, smem):
        smem[...] = x[...]

        @plgpu.warp_map
        def _(i):
            @plgpu.inline_mgpu(
                arg_types=(REF, SPLAT),
                emulate=lambda smem, i: smem.__setitem__((int(i), 0), 7),
            )
            def mark(ctx, smem, i):
                with mgpu.single_thread(mgpu.ThreadSubset.WARP):
                    memref.store(seven(), smem, [index(i), index(0)])

            mark(smem, i)

        o[...] = smem[...]

    want = X.copy()
    want[:4, 0] = 7
    everywhere.run(body, [X], want, plgpu.SMEM(SHAPE, F32))


def test_code_runs_in_a_pallas_call():
    def body(x, o):
        o[...] = emulated_double(loaded(x))

    def make(interpret):
        spec = plgpu.BlockSpec(SHAPE, lambda i: (i, 0))
        return plgpu.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct((256, 128), F32),
            in_specs=[spec],
            out_specs=spec,
            grid=(4,),
            interpret=interpret,
        )

    x = np.concatenate([X, X + 1, X + 2, X + 3])
    everywhere.check(make, [x], 2 * x)


def test_code_runs_in_each_instance_of_a_vmap():
    def body(x, o):
        @plgpu.inline_mgpu(arg_types=(REF,), return_type=array())
        def read(ctx, x):
            return mgpu.FragmentedArray.load_strided(x, vec_size=2)

        o[...] = read(x)

    x = np.stack([X, X + 1, X + 2])
    make = everywhere.kernel(body, OUT)
    everywhere.check(lambda interpret: jax.vmap(make(interpret)), [x], x)


def test_code_without_results_is_kept():
    def body(x, o):
        o[...] = x[...]

        @plgpu.inline_mgpu(
            arg_types=(REF,), return_type=(array(), array(SPLAT, (), I32))
        )
        def mark(ctx, o):
            memref.store(seven(), o, [index(0), index(0)])
            x = mgpu.FragmentedArray.load_strided(o, vec_size=2)
            return x, mgpu.FragmentedArray.splat(
                mgpu.c(1, ir.IntegerType.get_signless(32)), (), is_signed=True
            )

        mark(o)

    want = X.copy()
    want[0, 0] = 7
    everywhere.run(body, [X], want)


def test_operands_are_converted_under_warpgroup():
    def body(x, o):
        o[...] = double(plgpu.layout_cast(x[...], WGMMA))

    everywhere.run(body, [X], 2 * X, **INFERRED)


# --- compiled offline -----------------------------------------------------------------


@pytest.mark.offline
def test_the_text_of_a_program_names_what_code_is_given():
    def body(x, o):
        @plgpu.inline_mgpu(arg_types=(REF, STRIDED), return_type=array())
        def second(ctx, ref, x):
            return x

        o[...] = second(x.at[8:16], loaded(x))

    (report,) = offline.compile(everywhere.kernel(body, OUT)(), X, target="sm_90a")
    line = "inline_mgpu {operand=%0[8+:8, :]}, {operand=%2} {code=inline_mgpu"
    assert line in report.program


@pytest.mark.offline
def test_code_of_a_target_is_compiled():
    def body(x, o):
        @plgpu.inline_mgpu(arg_types=(REF,))
        def sleep(ctx, ref):
            mgpu.nanosleep(mgpu.c(100, ir.IntegerType.get_signless(32)))

        sleep(x)
        plgpu.inline_ptx("griddepcontrol.launch_dependents;")
        o[...] = x[...]

    for target in ("sm_90a", "sm_100a"):
        make = everywhere.kernel(body, OUT)
        (report,) = offline.compile(make(), X, target=target)
        text = report.ptx
        assert "nanosleep" in text and "griddepcontrol.launch_dependents" in text


GOOD = {
    "inline_mgpu": calls.top(),
    "RefType": calls.top(),
    "ShapeDtypeStruct": calls.top(shape=SHAPE, dtype=F32, layout=STRIDED),
}
EFFECTS = {
    "inline_mgpu.arg_types": "test_arrays_and_scalars_go_in_and_arrays_come_out",
    "inline_mgpu.return_type": "test_results_are_a_pytree",
    "inline_mgpu.emulate": "tests/emulator/gpu/test_inline.py",
    "RefType.transforms": "test_a_part_of_smem_is_a_memref_of_its_tiled_shape",
    "InterpretParams.inline_mgpu": "tests/emulator/gpu/test_inline.py",
}
FEATURES = [
    Row(
        "inline code",
        operations=("inline_mgpu",),
        runs="arrays_and_scalars_go_in_and_arrays_come_out",
        offline="code_of_a_target_is_compiled",
        instruction="nanosleep",
        omissions={
            "wait": "emulator/gpu/inline::a_missing_wait_shows_where_code_reads"
        },
    ),
]
