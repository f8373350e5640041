# SPDX-License-Identifier: Apache-2.0
"""Arrays in registers at the Mosaic level, in lockstep, against NumPy."""

from __future__ import annotations

import jax
import jax.experimental.mosaic.gpu as upstream
import ml_dtypes
import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu import mosaic as mgpu
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.mosaic import elements, layouts
from tests.support import mosaic_bodies as bodies
from tests.support.refusal import refused_by

F32, F16, I32 = np.float32, np.float16, np.int32


def sample(dtype, shape=(64, 128), seed=0):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        low = 1 if np.dtype(dtype).kind == "u" else -50
        return rng.integers(low, 50, shape).astype(dtype)
    return (rng.normal(size=shape) * 2).astype(dtype)


# name: (dtype, of two arrays, of NumPy if it is another one)
OPERATORS = {
    "add": (F32, lambda x, y: x + y + 1.5, None),
    "radd": (I32, lambda x, y: 3 + x - (7 - y), None),
    "mul": (F16, lambda x, y: -x * y, None),
    "true division": (F32, lambda x, y: 1.0 / (x / y), None),
    "floor division": (
        I32, lambda x, y: x // (y | 1) + 100 // (y | 1), None
    ),
    "floor division of floats": (F32, lambda x, y: x // y, None),
    "unsigned": (np.uint32, lambda x, y: (x // y) + (x >> 1) + x % y, None),
    "remainder": (
        I32, lambda x, y: x % (y | 1), lambda x, y: np.fmod(x, y | 1)
    ),
    "trunc_div": (
        I32, lambda x, y: x.trunc_div(y | 1), lambda x, y: np.trunc(x / (y | 1))
    ),
    "bits": (I32, lambda x, y: (x & y) | (x ^ 5) | ~y, None),
    "shifts": (I32, lambda x, y: (x << 2) + (y >> 1), None),
    "power": (F32, lambda x, y: x**3, None),
    "max, min": (
        F32, lambda x, y: x.max(y) - x.min(0.5),
        lambda x, y: np.maximum(x, y) - np.minimum(x, F32(0.5)),
    ),
    "select": (
        F32, lambda x, y: ((x < y) & (y >= 0.0)).select(x, y),
        lambda x, y: np.where((x < y) & (y >= 0), x, y),
    ),
    "compare": (
        I32, lambda x, y: (x == y).select(x + 1, (x != 3).select(y, x)),
        lambda x, y: np.where(x == y, x + 1, np.where(x != 3, y, x)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("layout", ["strided", "tiled"])
def test_an_operator_is_numpys(name, layout):
    dtype, function, of_numpy = OPERATORS[name]
    x, y = sample(dtype), sample(dtype, seed=1)

    def body(a, b, out):
        signed = None if x.dtype.kind == "f" else x.dtype.kind == "i"
        if layout == "strided":
            load = mgpu.FragmentedArray.load_strided
            operands = [load(r, is_signed=signed) for r in (a, b)]
        else:
            load = mgpu.FragmentedArray.load_untiled
            how = {"layout": mgpu.WGMMA_LAYOUT, "is_signed": signed}
            operands = [load(r, optimized=False, **how) for r in (a, b)]
        function(*operands).store_untiled(out, optimized=False)

    expected = np.asarray((of_numpy or function)(x, y)).astype(dtype)
    bodies.check(body, [x, y], expected, rtol=2e-3 if dtype is F16 else 1e-5)


def load(ref, layout=mgpu.WGMMA_LAYOUT, **options):
    return mgpu.FragmentedArray.load_untiled(
        ref, layout=layout, optimized=False, **options
    )


def store(array, ref):
    array.store_untiled(ref, optimized=False)


# name: (of an array, of NumPy, input dtype)
FUNCTIONS = {
    "exp": (lambda x: x.exp(), np.exp, F32),
    "exp, approximately": (lambda x: x.exp(approx=True), np.exp, F32),
    "exp2, log2": (lambda x: (x.exp2() + 1.0).log2(), lambda x: np.log2(2**x + 1), F32),
    "sin, cos": (lambda x: x.sin() * x.cos(), lambda x: np.sin(x) * np.cos(x), F32),
    "tanh": (lambda x: x.tanh(), np.tanh, F32),
    "roots": (
        lambda x: x.abs().sqrt() + (x * x + 1.0).rsqrt(),
        lambda x: np.sqrt(np.abs(x)) + 1 / np.sqrt(x * x + 1), F32,
    ),
    "log": (lambda x: (x.abs() + 1.0).log(), lambda x: np.log(np.abs(x) + 1), F32),
    "rounding": (
        lambda x: x.round() + x.round_even() * 8.0,
        lambda x: np.trunc(x + np.copysign(F32(0.5), x)) + np.rint(x) * 8, F32,
    ),
    "copysign": (
        lambda x: (x + 3.0).copysign(x), lambda x: np.copysign(x + 3, x), F32
    ),
    "atan2": (lambda x: x.atan2(x + 1.0), lambda x: np.arctan2(x, x + 1), F32),
    "of halves": (lambda x: (x * 0.5).exp(), lambda x: np.exp(x * F16(0.5)), F16),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_numpys(name):
    function, of_numpy, dtype = FUNCTIONS[name]
    x = sample(dtype)
    expected = of_numpy(x).astype(dtype)
    tolerance = 2e-3 if dtype is F16 or "approx" in name else 1e-5
    bodies.check(lambda a, out: store(function(load(a)), out), [x], expected,
                 rtol=tolerance)  # fmt: skip


F8, I4 = ml_dtypes.float8_e4m3fn, ml_dtypes.int4
CONVERSIONS = {
    "f32 to bf16": (F32, ml_dtypes.bfloat16, mgpu.WGMMA_LAYOUT),
    "f8 to f32": (F8, F32, mgpu.WGMMA_LAYOUT_8BIT),
    "f32 to f8": (F32, F8, mgpu.WGMMA_LAYOUT_8BIT),
    "i4 to f16": (I4, F16, mgpu.WGMMA_LAYOUT_UPCAST_4X),
    "u8 to i32": (np.uint8, I32, mgpu.WGMMA_LAYOUT_8BIT),
    "i32 to f32": (I32, F32, mgpu.WGMMA_LAYOUT),
    "f32 to i8": (F32, np.int8, mgpu.WGMMA_LAYOUT),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_is_numpys(name):
    source, target, layout = CONVERSIONS[name]
    x = sample(F32).clip(-7, 7).astype(source)

    def body(a, out):
        signed = elements.signedness(np.dtype(source))
        array = load(a, layout, is_signed=signed)
        to = elements.type_of(target)
        store(array.astype(to, is_signed=elements.signedness(np.dtype(target))), out)

    bodies.check(body, [x], x.astype(target))


def test_bits_are_those_of_another_type():
    x = sample(F32)

    def body(a, out):
        i32 = ir.IntegerType.get_signless(32)
        store(load(a).bitcast(i32, output_is_signed=True) + 1, out)

    bodies.check(body, [x], x.view(np.int32) + 1)


ROW, COLUMN = mgpu.WGMMA_ROW_LAYOUT, mgpu.WGMMA_COL_LAYOUT
# name: (the operation, NumPy's, the layout of its result)
REDUCTIONS = {
    "add rows": (lambda x, _: x.reduce("add", 1), lambda x: x.sum(1), ROW),
    "max columns": (
        lambda x, s: x.reduce("max", 0, scratch=s), lambda x: x.max(0), COLUMN
    ),
    "min of all": (
        lambda x, s: x.reduce("min", (0, 1), scratch=s), lambda x: x.min(), None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_has_the_reduced_layout(name):
    function, of_numpy, layout = REDUCTIONS[name]
    x = sample(I32)
    expected = np.asarray(of_numpy(x), I32)

    def body(a, out):
        scratch = bodies.smem(0, (4096,), F32)
        result = function(load(a, is_signed=True), scratch)
        assert result.shape == expected.shape
        assert isinstance(result.layout, mgpu.WGSplatFragLayout) or (
            result.layout == layout
        )
        store(result, out)

    bodies.check(body, [x], expected, smem_bytes=1 << 14)


def test_splats_reduce_without_data():
    expected = np.full(64, 24.0, F32)

    def body(out):
        two = mgpu.c(2.0, ir.F32Type.get())
        array = mgpu.FragmentedArray.splat(two, (64, 12))
        reduced = array.reduce("add", 1)
        assert reduced.shape == (64,)
        store(reduced.to_layout(mgpu.WGMMA_ROW_LAYOUT), out)

    bodies.check(body, [], expected)


def halves(x):
    """The columns swapped in two halves, by slices and assignments."""
    result = x.copy()
    half = x.shape[1] // 2
    result[:, :half] = x[:, half:]
    result[:, half:] = x[:, :half]
    return result


def in_a_loop(x):
    @mgpu.fori(mgpu.c(3, ir.IndexType.get()), [x, x * 0.5])
    def loop(i, carry):
        a, b = carry
        return [a + b, b]

    return loop.results[0]


SHAPES = {
    "broadcast rows": (
        lambda x: x.reduce("max", 1).broadcast_minor(128),
        lambda x: np.repeat(x.max(1, keepdims=True), 128, 1),
    ),
    "broadcast columns": (
        lambda x: x[0:64, 0:128].reduce("add", 1).broadcast_in_dim(
            (64, 128), (0,), mgpu.WGMMA_LAYOUT
        ),
        lambda x: np.repeat(x.sum(1, keepdims=True), 128, 1),
    ),
    "a reshape and back": (
        lambda x: (x.reshape((64, 16, 8)) * 2.0).reshape((64, 128)), lambda x: x * 2
    ),
    "halves": (halves, lambda x: np.concatenate([x[:, 64:], x[:, :64]], 1)),
    "concatenated": (
        lambda x: mgpu.concatenate([x[:, 64:], x[:, :64]], 1),
        lambda x: np.concatenate([x[:, 64:], x[:, :64]], 1),
    ),
    "to another layout": (
        lambda x: x.to_layout(mgpu.WGMMA_TRANSPOSED_LAYOUT) + 1.0, lambda x: x + 1
    ),
    "a loop": (in_a_loop, lambda x: x * 2.5),
    "a barrier of the optimizer": (mgpu.optimization_barrier, lambda x: x),
    "iota": (
        lambda x: x + mgpu.FragmentedArray.broadcasted_iota(
            ir.F32Type.get(), (64, 128), 1, mgpu.WGMMA_LAYOUT
        ),
        lambda x: x + np.arange(128, dtype=F32),
    ),
    "each element": (
        lambda x: x.foreach(lambda v, _: arith.addf(v, v), create_array=True),
        lambda x: x * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_numpys(name):
    function, of_numpy = SHAPES[name]
    x = sample(F32)
    bodies.check(lambda a, out: store(function(load(a)), out), [x], of_numpy(x),
                 rtol=1e-5)  # fmt: skip


RELAYOUTS = {
    "4x to 2x": ("WGMMA_LAYOUT_UPCAST_4X", "WGMMA_LAYOUT_UPCAST_2X", I4),
    "2x to a fragment": ("WGMMA_LAYOUT_UPCAST_2X", "WGMMA_LAYOUT", np.int8),
    "4x to a fragment": ("WGMMA_LAYOUT_UPCAST_4X", "WGMMA_LAYOUT", np.int8),
    "transposed": ("WGMMA_LAYOUT", "WGMMA_TRANSPOSED_LAYOUT", F16),
    "back": ("WGMMA_TRANSPOSED_LAYOUT", "WGMMA_LAYOUT", F32),
    "of TMEM, transposed": ("TCGEN05_LAYOUT", "TCGEN05_TRANSPOSED_LAYOUT", F16),
    "of TMEM to rows": ("TCGEN05_LAYOUT", "TMEM_NATIVE_LAYOUT", F32),
    "of rows": ("TMEM_NATIVE_LAYOUT", "TCGEN05_LAYOUT", F16),
}


@pytest.mark.parametrize("name", RELAYOUTS)
def test_a_layout_is_reached_from_another(name):
    source, target, dtype = RELAYOUTS[name]
    x = sample(F32, (128, 64)).clip(-7, 7).astype(dtype)
    signed = elements.signedness(np.dtype(dtype))

    def body(a, out):
        array = load(a, getattr(mgpu, source), is_signed=signed)
        moved = array.to_layout(getattr(mgpu, target))
        assert moved.layout == getattr(mgpu, target)
        store(moved, out)

    bodies.check(body, [x], x)


LAYOUTS = {
    name: layout
    for name in mgpu.__all__
    if name.endswith(("_LAYOUT", "8BIT", "2X", "4X"))
    and isinstance(layout := getattr(mgpu, name), mgpu.TiledLayout)
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_registers_are_those_of_upstream(name):
    layout, theirs = LAYOUTS[name], getattr(upstream, name)
    shape = tuple(2 * n for n in layout.base_tile_shape)
    assert layouts.registers_shape(layout, shape) == theirs.registers_shape(shape)
    i32 = ir.IntegerType

    def body(out):
        length = layout.vector_length
        strides = np.cumprod([1, *shape[:0:-1]])[::-1]
        step = int(strides[_vector_axis(layout)])
        values = []
        for index in theirs.thread_idxs(shape):
            flat = mgpu.c(0, ir.IndexType.get())
            for i, stride in zip(index, strides, strict=True):
                scaled = arith.muli(i, mgpu.c(int(stride), i.type))
                flat = arith.addi(flat, scaled)
            flat = arith.index_cast(i32.get_signless(32), flat)
            more = [
                arith.addi(flat, mgpu.c(v * step, flat.type)) for v in range(length)
            ]
            values.append(dtypes.pack(more))
        array = mgpu.FragmentedArray(
            _registers=layouts.ndarray(values, theirs.registers_shape(shape)),
            _layout=layout,
            _is_signed=True,
        )
        assert array.shape == shape
        assert all(
            a == b for a, b in zip(array.copy().registers.flat, values, strict=True)
        )
        store(array, out)

    expected = np.arange(np.prod(shape), dtype=I32).reshape(shape)
    bodies.check(body, [], expected)


def _vector_axis(layout):
    return layout.tiling.dims[layout.vector_dim].axis + layout.tiling.rank


@pytest.mark.parametrize("signed", [True, None])
def test_registers_and_arrays_are_two_forms_of_one_thing(signed):
    x = sample(I32 if signed else F8)

    def body(a, out):
        layout = mgpu.WGMMA_LAYOUT_8BIT
        array = load(a, layout, is_signed=signed)
        again = mgpu.FragmentedArray(
            _registers=array.registers.copy(), _layout=layout, _is_signed=signed
        )
        assert again.mlir_dtype == elements.type_of(x.dtype)
        leaves, tree = jax.tree.flatten([again])
        (found,) = jax.tree.unflatten(tree, leaves)
        store(found, out)

    bodies.check(body, [x], x)


# name: what is refused
REFUSED = {
    "layouts": lambda x: x + x.to_layout(mgpu.WGMMA_TRANSPOSED_LAYOUT),
    "true division": lambda x: x.bitcast(
        ir.IntegerType.get_signless(32), output_is_signed=True
    ) / 2,
    "a function": lambda x: x.reduce(arith.addf, 1),
    "across warps": lambda x: x.to_layout(mgpu.WGStridedFragLayout((64, 128), 4)),
    "select": lambda x: x.select(x, x),
    "rounding": lambda x: x.astype(
        ir.F16Type.get(), rounding=mgpu.Rounding.TO_ZERO
    ),
    "broadcast": lambda x: x.broadcast((2, 64, 128)),
    "index": lambda x: x[0:65],
    "sign": lambda x: mgpu.FragmentedArray(
        _registers=x.registers, _layout=x.layout, _is_signed=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
@refused_by(lambda body: bodies.run(body, [sample(F32)], []))
def test_a_mistake_is_refused(a, *, what):
    REFUSED[what](load(a))
