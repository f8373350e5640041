# SPDX-License-Identifier: Apache-2.0
"""Printing from kernels: in the emulator, as emitted code, under both semantics."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.errors import PtxError
from tests.support.lockstep import kernels as in_lockstep
from tests.support.refusal import refused, refused_by
from tests.support.semantics import BOTH
from tests.support.tensor_products import BLACKWELL

X = np.arange(128, dtype=np.float32)


def kernel(body, x=X, **options):
    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), **options
    )


def lines(capsys):
    return sorted(capsys.readouterr().out.splitlines())


def everywhere(body, capsys, x=X, **options):
    """The lines of a kernel, sorted: the same in the emulator and as emitted code."""
    kernel(body, x, **options)(x)
    first = lines(capsys)
    for semantics in BOTH:
        in_lockstep.run(kernel(body, x, **options), [x], semantics)
        assert lines(capsys) == first
    return first


def printing(fmt, *indices):
    """A body that prints elements, or the whole array."""

    def body(x_ref, o_ref):
        plgpu.debug_print(fmt, *(x_ref[i] for i in indices))
        o_ref[...] = x_ref[...]

    return body


def show(x_ref, o_ref):
    i = lax.axis_index("i")
    plgpu.debug_print("{{100%}} of {}: {}, {}", i, x_ref[3] / 2, x_ref[3] > i)
    o_ref[plgpu.ds(i * 64, 64)] = x_ref[plgpu.ds(i * 64, 64)]


# --- scalars --------------------------------------------------------------------------


def test_each_warpgroup_prints_one_line(capsys):
    expected = ["{100%} of 0: 1.5, True", "{100%} of 1: 1.5, True"]
    assert everywhere(show, capsys, grid=(2,), grid_names=("i",)) == expected


@pytest.mark.parametrize(
    ("spec", "dtype", "value", "text"),
    [
        (".2f", "float32", 2.0, "2.00"),
        ("8.3f", "float32", -1.5, "  -1.500"),
        ("<8.1e", "float32", 1500.0, "1.5e+03 "),
        ("+g", "float32", 3.0, "+3"),
        ("8", "float32", 3.0, "     3.0"),
        ("8", "float32", 0.25, "    0.25"),
        ("d", "int32", -5, "-5"),
        ("05d", "int32", -5, "-0005"),
        ("+d", "int8", 5, "+5"),
        ("<5d", "int16", 5, "5    "),
        ("5", "uint8", 200, "  200"),
        ("x", "int32", 255, "ff"),
        ("X", "uint32", 0xDEADBEEF, "DEADBEEF"),
        ("x", "int8", -1, "ff"),
        ("08x", "int32", -2, "fffffffe"),
        ("o", "uint8", 8, "10"),
        (".1f", "int32", -3, "-3.0"),
        (".1f", "uint32", 4_000_000_000, "4000000000.0"),
        ("d", "bool", True, "1"),
        ("", "int8", -7, "-7"),
        ("", "uint8", 249, "249"),
        ("", "int16", -300, "-300"),
        ("", "uint32", 4_000_000_000, "4000000000"),
        ("", "int32", -2_000_000_000, "-2000000000"),
        ("", "float16", 0.5, "0.5"),
        ("", "bfloat16", -2.5, "-2.5"),
        ("", "bfloat16", 3.0, "3.0"),
        ("", "float8_e4m3fn", -1.5, "-1.5"),
        ("", "float32", 100000.0, "100000.0"),
        ("", "float32", float("inf"), "inf"),
        ("", "float32", float("nan"), "nan"),
        ("", "bool", True, "True"),
        ("", "bool", False, "False"),
        # Six digits, as in C.
        ("", "float32", 1 / 3, "0.333333"),
        ("", "float32", 1e6, "1e+06"),
        ("", "float32", -0.0, "-0.0"),
        ("", "float32", 1e-30, "1e-30"),
    ],
)
def test_formats_are_those_of_python(spec, dtype, value, text, capsys):
    x = np.full(16, value, jnp.dtype(dtype))
    assert everywhere(printing(f"<{{:{spec}}}>", 0), capsys, x) == [f"<{text}>"]


def test_a_format_may_name_the_positions_of_the_values(capsys):
    fmt = "{{{1}}} {0} {1:.2f}"
    assert everywhere(printing(fmt, 2, 7), capsys) == ["{7.0} 2.0 7.00"]


def test_an_element_may_be_printed_without_its_position(capsys):
    def body(x_ref, o_ref):
        plgpu.debug_print("{}, {!s:.2f}", x_ref[:2], x_ref[2:4])
        o_ref[...] = x_ref[...]

    assert everywhere(body, capsys) == ["[0]: 0.0, 2.00", "[1]: 1.0, 3.00"]


def test_the_fifth_value_that_may_be_whole_is_printed_as_c_does(capsys):
    fmt = "{} {} {} {} {} {:.1f}"
    assert everywhere(printing(fmt, *range(1, 7)), capsys) == ["1.0 2.0 3.0 4.0 5 6.0"]


def test_a_warp_prints_scalars(capsys):
    def body(x_ref, o_ref):
        @plgpu.warp_map
        def _(warp):
            plgpu.debug_print("warp {}: {}", warp, x_ref[warp])

        o_ref[...] = x_ref[...]

    assert everywhere(body, capsys) == [f"warp {i}: {i}.0" for i in range(4)]


def test_each_warp_prints_each_element_of_its_array_once(capsys):
    def body(x_ref, o_ref):
        @plgpu.warp_map
        def _(warp):
            plgpu.debug_print("{}: {}", warp, x_ref[plgpu.ds(3 * warp, 3)])

        o_ref[...] = x_ref[...]

    expected = [f"{i // 3}: [{i % 3}]: {float(i)}" for i in range(12)]
    assert everywhere(body, capsys) == expected


# --- arrays ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((64, 16), plgpu.Layout.WGMMA),
        ((128,), None),
        ((3, 128), None),
        ((384,), None),
        ((100,), None),
        ((7, 33), None),
        ((1,), None),
        ((64,), plgpu.Layout.WGMMA_ROW),
        ((16,), plgpu.Layout.WGMMA_COL),
    ],
)
def test_elements_of_replicated_and_strided_arrays_are_printed_once(
    shape, layout, capsys
):
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)

    def body(x_ref, o_ref):
        value = plgpu.load(x_ref, layout=layout, optimized=False)
        plgpu.debug_print("x is {:3d}", value)
        o_ref[...] = value

    expected = sorted(f"x is {list(i)}: {x[i]:3d}" for i in np.ndindex(shape))
    assert everywhere(body, capsys, x) == expected


def test_arrays_of_one_shape_and_scalars_share_a_line(capsys):
    def body(x_ref, o_ref):
        x = x_ref[...]
        plgpu.debug_print("{} {:.0f} {} {}", x_ref[3], x, x > 100, 1.0 - 0 * x)
        o_ref[...] = x

    expected = sorted(f"3.0 [{i}]: {i} [{i}]: {i > 100} [{i}]: 1.0" for i in range(128))
    assert everywhere(body, capsys) == expected


def test_constants_and_counters_are_printed_in_any_layout(capsys):
    def body(x_ref, o_ref):
        counter = plgpu.broadcasted_iota(jnp.int32, (128,), 0)
        plgpu.debug_print("{} {}", counter, jnp.full((128,), 7))
        o_ref[...] = x_ref[...]

    expected = sorted(f"[{i}]: {i} [{i}]: 7" for i in range(128))
    assert everywhere(body, capsys) == expected


@refused
def test_under_lane_semantics_arrays_of_a_line_have_one_layout():
    def body(x_ref, o_ref):
        x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        y = x_ref[...]
        plgpu.debug_print("{} {}", x, y)  # HERE
        o_ref[...] = x

    x = np.zeros((64, 64), np.float32)
    in_lockstep.run(kernel(body, x), [x], plgpu.LoweringSemantics.Lane)


# --- jax.debug.print ------------------------------------------------------------------


def test_jax_debug_print_prints_the_same_lines(capsys):
    def body(x_ref, o_ref):
        x = x_ref[...]
        jax.debug.print("{name} {} {x:.1f}: {y}", 7, name="sum", x=jnp.sum(x), y=x)
        o_ref[...] = x

    expected = sorted(f"sum 7 8128.0: [{i}]: {i}.0" for i in range(128))
    assert everywhere(body, capsys) == expected


@pytest.mark.parametrize("ordered", [True, False])
@refused_by(lambda body: kernel(body)(X))
def test_what_only_a_host_can_print_is_refused(x_ref, o_ref, *, ordered):
    x = x_ref[0]
    jax.debug.print("{}", x if ordered else [x, x], ordered=ordered)  # HERE


# --- checks ---------------------------------------------------------------------------


def checking(x_ref, o_ref):
    x = x_ref[...]
    i = lax.axis_index("i")
    plgpu.debug_check(jnp.all(x <= 60 + i), "100% of the weights are small")
    o_ref[...] = x


def checked(x, **options):
    params = plgpu.CompilerParams(**options)
    grid = {"grid": (2,), "grid_names": ("i",), "name": "k"}
    return kernel(checking, x, **grid, compiler_params=params)


@refused_by(lambda body: kernel(body)(X))
def test_the_emulator_raises_where_a_condition_is_false(x_ref, o_ref):
    o_ref[...] = x_ref[...]
    plgpu.debug_check(x_ref[1] == 0, "an odd one")  # HERE


def test_a_failed_check_prints_its_position_and_traps(capsys):
    kernel = checked(X[:62], debug_checks=True)
    for semantics in BOTH:
        with pytest.raises(PtxError, match="a thread traps"):
            in_lockstep.run(kernel, [X[:62]], semantics)
        first, at, place = capsys.readouterr().out.splitlines()
        assert first == "kernel k: debug_check: 100% of the weights are small"
        assert "test_debug.py:" in at
        assert place == "  in: i=0"


@pytest.mark.parametrize("semantics", BOTH)
def test_checks_that_hold_print_nothing(semantics, capsys):
    (result,) = in_lockstep.run(checked(X[:61], debug_checks=True), [X[:61]], semantics)
    np.testing.assert_array_equal(result, X[:61])
    assert lines(capsys) == []


def test_checks_are_enabled_for_what_is_called_in_a_context():
    kernel = jax.jit(checked(X))
    with plgpu.enable_debug_checks(True):
        assert "trap" in plgpu.offline.lower(kernel, X)[0].mlir
        with plgpu.enable_debug_checks(False):
            assert "trap" not in plgpu.offline.lower(kernel, X)[0].mlir
    assert "trap" not in plgpu.offline.lower(kernel, X)[0].mlir


@pytest.mark.parametrize("semantics", BOTH)
def test_a_check_that_is_not_enabled_leaves_nothing(semantics):
    def nested(x_ref, o_ref):
        plgpu.debug_check(jnp.sum(x_ref[...]) > 1e9, "the sum")
        o_ref[...] = x_ref[...]

        @plgpu.loop(0, 2)
        def _(i):
            plgpu.debug_check(x_ref[i] > 0, "an element")

    def plain(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        plgpu.loop(0, 2)(lambda i: None)

    params = plgpu.CompilerParams(lowering_semantics=semantics)
    texts = [
        plgpu.offline.lower(kernel(body, name="k", compiler_params=params), X)[0].mlir
        for body in (nested, plain)
    ]
    assert texts[0] == texts[1]


def test_the_environment_enables_checks(monkeypatch):
    monkeypatch.setenv("PALLAS_GPU_DEBUG_CHECKS", "1")
    (report,) = plgpu.offline.lower(checked(X), X)
    assert "100%% of the weights" in report.mlir


@refused_by(lambda body: kernel(body)(X))
def test_an_array_is_no_condition(x_ref, o_ref):
    plgpu.debug_check(x_ref[...] > 0, "all")  # HERE


# --- layouts --------------------------------------------------------------------------

SWIZZLED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def looking(x_ref, o_ref, tile, plain):
    x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
    plgpu.print_layout("x: {}", x)
    plgpu.print_layout("rows: {}", jnp.sum(x, axis=1))
    plgpu.print_layout("tile: {}", tile.at[0:8])
    plgpu.print_layout("plain: {}", plain)
    plgpu.print_layout("argument: {}", x_ref)
    plgpu.print_layout("sum: {}", jnp.sum(x))
    plgpu.print_layout("ones: {}", jnp.ones((64, 64)))
    plain[...] = x
    tile[...] = x
    o_ref[...] = tile[...]


def looks(body=looking, **options):
    shape = (64, 64)
    scratch = [
        plgpu.SMEM(shape, jnp.float32, transforms=SWIZZLED),
        plgpu.SMEM(shape, jnp.float32),
    ]
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    return plgpu.kernel(body, out_type=out, scratch_types=scratch, **options)


LAYOUTS = """x: Layout.WGMMA
rows: Layout.WGMMA_ROW
tile: tiling (8, 32), 128-byte swizzle
plain: no transforms
argument: row-major, in GMEM
sum: a scalar, in a register of every thread
ones: no layout: each use materializes it in its own
"""


@pytest.mark.parametrize("semantics", BOTH)
def test_layouts_are_printed_while_the_kernel_is_compiled(semantics, capsys):
    params = plgpu.CompilerParams(lowering_semantics=semantics)
    made = looks(compiler_params=params)
    plgpu.offline.lower(made, np.zeros((64, 64), np.float32))
    expected = LAYOUTS
    if semantics is plgpu.LoweringSemantics.Warpgroup:  # tiled for the store of x
        expected = LAYOUTS.replace("no transforms", "tiling (8, 8), 32-byte swizzle")
    assert lines(capsys) == sorted(expected.splitlines())


def test_the_emulator_knows_the_layouts_that_are_declared(capsys):
    looks(grid=(2,), grid_names=("i",))(np.zeros((64, 64), np.float32))
    unknown = "chosen by the compiler (the emulator has no layouts)"
    expected = [
        line if line.startswith("tile") else f"{line.split(':')[0]}: {unknown}"
        for line in LAYOUTS.splitlines()
    ]
    assert lines(capsys) == sorted(expected)


@pytest.mark.parametrize("semantics", BOTH)
def test_printing_a_layout_does_not_change_the_kernel(semantics):
    def body(look, x_ref, o_ref, tile, plain):
        x = x_ref[...]
        if look:
            plgpu.print_layout("{}", x)
            plgpu.print_layout("{}", plain)
        plain[...] = x * 2
        o_ref[...] = plain[...].T

    params = plgpu.CompilerParams(lowering_semantics=semantics)
    texts = []
    for look in (False, True):
        made = looks(functools.partial(body, look), name="k", compiler_params=params)
        (report,) = plgpu.offline.lower(made, np.zeros((64, 64), np.float32))
        texts.append(report.mlir)
    assert texts[0] == texts[1]


def test_a_layout_in_a_branch_is_printed_once(capsys):
    def body(x_ref, o_ref):
        def yes():
            x = x_ref[...]
            plgpu.print_layout("{}", x)
            return x

        o_ref[...] = lax.cond(x_ref[0] > 0, yes, lambda: 2 * x_ref[...])

    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    plgpu.offline.lower(kernel(body, compiler_params=params), X)
    assert len(lines(capsys)) == 1


@pytest.mark.parametrize("fmt", ["", "{} {}", "{:d}{}", "{x}", "{"])
@refused_by(lambda body: kernel(body)(X))
def test_a_layout_has_one_placeholder(x_ref, o_ref, *, fmt):
    plgpu.print_layout(fmt, x_ref)  # HERE


@refused_by(lambda body: kernel(body, scratch_types=[plgpu.Barrier()])(X))
def test_a_barrier_has_no_layout(x_ref, o_ref, barrier):
    plgpu.print_layout("{}", barrier)  # HERE


# --- tensor memory --------------------------------------------------------------------

HALVES = plgpu.TMEM((64, 32), jnp.float32)
PACKED = plgpu.TMEM((128, 16), jnp.float16, packed=True)
TWO = plgpu.TMEM((2, 128, 16), jnp.float32)
# A declaration, the part that is printed, how many lines, and one of them. An element
# of the arrays is its number.
HELD = {
    "halves": (HALVES, lambda x: x, 2048, "lane 115, column 9, [51, 25]: 1657.0"),
    "packed": (
        PACKED, lambda x: x, 2048, "lane 99, column 7, bit 16, [99, 15]: 1599.0",
    ),
    "a part": (
        TWO, lambda x: x.at[1, :, 8:], 1024, "lane 0, column 26, [0, 2]: 2058.0",
    ),
    "a range": (
        TWO, lambda x: x.at[:, :, 8:], 2048, "lane 0, column 26, [1, 0, 2]: 2058.0",
    ),
    "a part that a scalar chooses": (
        TWO, lambda x: x.at[lax.axis_index("i")], 2048, "lane 0, column 2, [0, 2]: 2.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("held", "part", "count", "line"), HELD.values(), ids=HELD)
def test_an_array_in_tensor_memory_is_printed_as_it_lies(
    held, part, count, line, capsys
):
    layout = plgpu.Layout.WGMMA if held is HALVES else plgpu.Layout.TCGEN05

    def body(x_ref, o_ref, tile):
        tile[...] = plgpu.load(x_ref, layout=layout, optimized=False)
        plgpu.debug_print("{}!", part(tile))
        o_ref[...] = x_ref[...]

    x = np.arange(np.prod(held.shape)).reshape(held.shape).astype(held.dtype)
    options = {"scratch_types": [held], "compiler_params": BLACKWELL}
    found = everywhere(body, capsys, x, grid=(1,), grid_names=("i",), **options)
    assert len(set(found)) == count
    assert f"{line}!" in found


@refused
def test_metadata_in_tensor_memory_is_not_printed():
    def body(x_ref, o_ref, held):
        plgpu.debug_print("{}", held)  # HERE

    layout = plgpu.layouts.TmemLayout.sparse_metadata()
    held = plgpu.TMEM((128, 64), jnp.uint2, layout=layout)
    kernel(body, scratch_types=[held], compiler_params=BLACKWELL)(X)


# --- refusals -------------------------------------------------------------------------


@refused_by(lambda body: kernel(body)(X))
def test_braces_without_a_value_are_refused(x_ref, o_ref):
    plgpu.debug_print("{")


@pytest.mark.parametrize(
    "fmt",
    [
        "{}",
        "{} {} {}",
        "{a} {}",
        "{:^3} {}",
        "{!r} {}",
        "{",
        "{0}",
        "{0} {2}",
        "{0} {}",
    ],
)
@refused_by(lambda body: kernel(body)(X))
def test_placeholders_that_do_not_match_the_values_are_refused(x_ref, o_ref, *, fmt):
    plgpu.debug_print(fmt, x_ref[0], 1)  # HERE


@pytest.mark.parametrize("spec", ["d", "x", ".3"])
@refused_by(lambda body: kernel(body)(X))
def test_a_format_that_does_not_suit_the_type_is_refused(x_ref, o_ref, *, spec):
    plgpu.debug_print(f"{{:{spec}}}", x_ref[0])  # HERE


@refused_by(lambda body: kernel(body)(X))
def test_arrays_of_different_shapes_are_refused(x_ref, o_ref):
    plgpu.debug_print("{} {}", x_ref[...], x_ref[0:64])  # HERE


@refused_by(lambda body: kernel(body)(X))
def test_poison_is_not_printed(x_ref, o_ref):
    plgpu.debug_print("{}", o_ref[...])  # HERE
    o_ref[...] = x_ref[...]


@pytest.mark.offline
@pytest.mark.parametrize(
    ("made", "traps"),
    [
        (kernel(printing("{}", ...)), False),
        (kernel(show, grid=(2,), grid_names=("i",)), False),
        (checked(X, debug_checks=True), True),
    ],
    ids=["array", "scalars", "check"],
)
def test_it_compiles_to_calls_of_vprintf(made, traps):
    (report,) = plgpu.offline.compile(made, X)
    assert "vprintf" in report.ptx and ("trap;" in report.ptx) == traps


GOOD = {
    "debug_print": lambda e: {"fmt": "{}", "args": (e.i,)},
    "debug_check": lambda e: {"condition": e.i == 0, "message": "first"},
    "print_layout": lambda e: {"fmt": "{}", "x": e.x},
}
EFFECTS = {
    "debug_print.args": [(1,), (2,)],
    "CompilerParams.debug_checks": "test_a_failed_check_prints_its_position_and_traps",
}
