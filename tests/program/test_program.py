# SPDX-License-Identifier: Apache-2.0
"""Programs: their text, and that malformed ones are found."""

from __future__ import annotations

import dataclasses
import re
import runpy
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, offline
from pallas_gpu.layouts.window import Sum, Window
from pallas_gpu.program import spec
from pallas_gpu.program.build import region_of, variables_of
from pallas_gpu.program.nodes import Constant, Kind, Value
from pallas_gpu.program.text import text
from tests.support import golden
from tests.support.semantics import BOTH
from tools.source_tree import ROOT

X = jax.ShapeDtypeStruct((8, 128), jnp.float32)


@plgpu.kernel(
    out_type=X,
    grid=(2,),
    grid_names=("i",),
    scratch_types={"smem": plgpu.SMEM((4, 128), jnp.float32), "bar": plgpu.Barrier()},
)
def doubled(x, out, smem, bar):
    """A copy, a loop, a branch, a while loop and code of warps."""
    rows = plgpu.ds(jax.lax.axis_index("i") * 4, 4)
    plgpu.copy_gmem_to_smem(x.at[rows], smem, bar)
    plgpu.barrier_wait(bar)

    def step(row, total):
        value = smem[row] * 2
        out[jax.lax.axis_index("i") * 4 + row] = value
        return total + row

    total = jax.lax.fori_loop(0, 4, step, 0)
    last = jax.lax.while_loop(lambda n: n < 9, lambda n: n + 2, total)

    @plgpu.when(last > 9)
    def _():
        smem[...] = jnp.zeros((4, 128), jnp.float32)

    @plgpu.warp_map
    def _(warp):
        plgpu.delay(warp)


def region():
    (params,) = offline.launches(jax.make_jaxpr(doubled)(np.zeros((8, 128), "f4")))
    return region_of(params.jaxpr)


def find(within, kind):
    """The first operation of a kind, with the regions around it."""
    for op in within.ops:
        if op.kind is kind:
            return op
        for inner in op.regions:
            if (found := find(inner, kind)) is not None:
                return found
    return None


def test_text(request):
    shown = text(region(), "doubled")
    lines = re.findall(r"# .*test_program.py:\d+", shown)
    assert len(lines) > 10
    golden.compare(request, re.sub(r" +# .*", "", shown).strip())


test_text.has_golden_text = True  # type: ignore[attr-defined]


def changed(kind, **what):
    """A program of one operation of a kind, which is changed."""
    op = find(region(), kind)
    return dataclasses.replace(op, **{k: f(op) for k, f in what.items()})


def of_another_type(value):
    return Value(value.index, jax.core.ShapedArray((3,), jnp.int32))


def with_inputs(op, change):
    """The regions, of which the last has other inputs."""
    *others, last = op.regions
    inputs = (*last.inputs[:-1], change(last.inputs[-1]))
    return (*others, dataclasses.replace(last, inputs=inputs))


def with_results(op, change):
    """The regions, of which the first has other results."""
    first, *others = op.regions
    return (dataclasses.replace(first, results=change(first.results)), *others)


MALFORMED = {
    "an input of the type": (
        Kind.IF, {"regions": lambda op: with_inputs(op, of_another_type)},
    ),
    "selects": (
        Kind.IF,
        {"inputs": lambda op: (Constant(np.zeros(3)), *op.inputs[1:])},
    ),
    "each region returns": (
        Kind.IF, {"regions": lambda op: with_results(op, lambda r: (*r, *op.inputs))},
    ),
    "a carry has one type": (
        Kind.FOR, {"results": lambda op: tuple(map(of_another_type, op.results))},
    ),
    "a known number of times": (Kind.FOR, {"params": lambda op: {"length": -1}}),
    "one region": (Kind.FOR, {
        "regions": lambda op: op.regions * 2, "entries": lambda op: op.entries * 2,
    }),
    "returns one bool": (
        Kind.WHILE, {"regions": lambda op: with_results(op, lambda r: op.inputs[-1:])},
    ),
    "a condition and a body": (Kind.WHILE, {
        "regions": lambda op: op.regions[1:], "entries": lambda op: op.entries[1:],
    }),
    "what it makes are references": (
        Kind.SCOPE, {"regions": lambda op: with_inputs(op, of_another_type)},
    ),
    "the index of the warp": (
        Kind.WARPS, {"regions": lambda op: with_inputs(op, of_another_type)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", MALFORMED)
def test_malformed_operations_are_found(sentence):
    kind, changes = MALFORMED[sentence]
    found = list(spec.violated(changed(kind, **changes)))
    assert any(sentence in said for said in found), found


ARRAY = Sum(0, (of_another_type(Value(0, None)),))


def first_access():
    return next(
        op for op in find(region(), Kind.FOR).regions[0].ops if op.name == "get"
    )


@pytest.mark.parametrize(
    ("sentence", "window"),
    [
        ("a range for each axis", Window.whole((4,))),
        (
            "integer scalars",
            Window.whole((4, 128)).at((of_another_type(Value(0, None)), 0)),
        ),
    ],
)
def test_malformed_windows_are_found(sentence, window):
    op = first_access()
    other = dataclasses.replace(op.operands["ref"], window=window)
    found = list(spec.violated(dataclasses.replace(op, operands={"ref": other})))
    assert any(sentence in said for said in found), found


def test_order_and_numbers_are_checked():
    whole = region()
    assert not list(spec.complaints(whole))
    backwards = dataclasses.replace(
        whole.ops[0].regions[0], ops=whole.ops[0].regions[0].ops[::-1]
    )
    found = " ".join(spec.complaints(backwards))
    assert "earlier results" in found and "in order" in found
    foreign = dataclasses.replace(whole, results=(Value(0, None),))
    with pytest.raises(errors.InternalError, match="returns its inputs"):
        spec.check(foreign)


def test_what_a_trace_captures_is_an_input():
    ref = jax.new_ref(jnp.zeros(4))

    def outer(x):
        body = jax.make_jaxpr(lambda y: y + x + ref[0] + jnp.asarray(np.ones(4))[0])(x)
        assert len(region_of(body).inputs) == len(variables_of(body)) == 3
        spec.check(region_of(body))
        return x

    jax.make_jaxpr(outer)(1.0)


@pytest.mark.parametrize("semantics", BOTH)
def test_the_documents_show_the_program_of_their_kernel(tmp_path, semantics):
    page = (ROOT / "docs/semantics.md").read_text(encoding="utf-8")
    section = page.split("## The program")[1]
    source = section.split("```python\n")[1].split("```")[0]
    shown = section.split("```\n\n")[1].split("\n\n")[0]
    file = tmp_path / "k.py"
    params = f"plgpu.CompilerParams(lowering_semantics=plgpu.{semantics})"
    source = source.replace("grid=(8,),", f"grid=(8,), compiler_params={params},")
    file.write_text(source.rpartition("print")[0], encoding="utf-8")
    found = runpy.run_path(str(file))["report"].program
    found = re.sub(r"# \S*k\.py", "# k.py", found).strip()
    assert found == textwrap.dedent(shown).strip()
