# SPDX-License-Identifier: Apache-2.0
"""`explain` names the cause of each slow kernel, with its line; objects, JSON, HTML."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, offline, ops
from pallas_gpu.__main__ import main
from pallas_gpu.explanation.report import SCHEMA_VERSION
from pallas_gpu.runtime import stages
from pallas_gpu.runtime.resources_report import Resources
from tests.ops import test_compiled
from tests.support.slow_kernels import CASES, gathered_ahead
from tools import rules_table
from tools.source_tree import ROOT

pytestmark = [pytest.mark.offline, pytest.mark.sass]
PAGE = (ROOT / "docs/explain.md").read_text(encoding="utf-8")


@functools.cache
def explained(name):
    case = CASES[name]
    return plgpu.explain(case.make())(*case.shapes)


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_found_with_its_line(name):
    case = CASES[name]
    found = explained(name).slow
    assert case.kind in [f.kind.id for f in found[:2]]
    (cause,) = [f for f in found if f.kind.id == case.kind]
    assert cause.at.file.endswith("tests/support/slow_kernels.py")
    assert cause.at.line == case.line
    assert cause.hint and cause.share > 0.05
    assert case.facts.items() <= cause.facts.items()


def test_a_loop_with_num_stages_does_not_wait_for_loads():
    case = CASES["loads at computed indices"]
    found = plgpu.explain(gathered_ahead())(*case.shapes).slow
    assert case.kind not in [f.kind.id for f in found]


@pytest.mark.parametrize("name", CASES)
def test_answers_fit_the_schema(name):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(rules_table.EXPLAIN_SCHEMA.read_text())
    answer = json.loads(explained(name).to_json())
    jsonschema.validate(answer, schema)
    assert answer["schema"] == SCHEMA_VERSION
    assert answer["complete"]


def test_the_page_and_the_schema_have_every_kind():
    assert rules_table.EXPLAIN_SCHEMA.read_text() == rules_table.explain_schema()
    assert rules_table.EXPLAIN_PAGE.read_text() == rules_table.explain_page()


def test_the_example_of_the_page_prints_what_the_page_says(
    tmp_path, monkeypatch, capsys
):
    (source,) = re.findall(r"```python\n(import jax.*?)```", PAGE, re.DOTALL)
    (shown,) = re.findall(r"<!-- output -->\n```\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sparse.py").write_text(source)
    shapes = "bf16[512,64,64],i32[64]"
    assert main(["explain", "sparse.py:gram", "--shapes", shapes]) == 1
    assert capsys.readouterr().out == shown


def test_a_notebook_shows_what_the_text_says():
    shown = explained("bank conflicts")._repr_html_()
    assert "<b>bank-conflicts</b>: a load of SMEM has 32-way bank conflicts" in shown
    assert "&gt;" in explained("a conversion in a loop")._repr_html_()


def test_an_access_without_gmem_is_not_called_slow():
    def twice(x, o):
        o[...] = x[...] * 2

    x = jax.ShapeDtypeStruct((128, 64), jnp.float32)
    (kernel,) = plgpu.explain(plgpu.kernel(twice, out_type=x))(x).kernels
    assert not kernel.slow
    assert [f.kind.id for f in kernel.findings] == ["access", "access"]


def test_every_kernel_of_a_function_is_explained_and_those_of_ops():
    def both(a, b, x):
        return ops.matmul(a, b), ops.softmax(x)

    a = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
    matmul, softmax = plgpu.explain(jax.jit(both))(a, a, x).kernels
    assert not matmul.slow and not softmax.slow
    (product, *_) = [f for f in matmul.findings if f.kind.id == "product"]
    assert product.facts["instruction"] == "wgmma"
    assert any(f.facts.get("path") == "TMA" for f in matmul.findings)
    assert softmax.bound == "memory"


def test_gathered_rows_count_as_what_is_copied():
    def body(x, rows, o):
        @plgpu.loop(0, 64, init_carry=jnp.zeros((4, 1024)), num_stages=3)
        def total(i, acc):
            return acc + x[rows[i]]

        o[plgpu.program_id(0)] = total

    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    rows = jax.ShapeDtypeStruct((64, 4), jnp.int32)
    out = jax.ShapeDtypeStruct((4096, 4, 1024), jnp.float32)
    (kernel,) = plgpu.explain(plgpu.pallas_call(body, out, grid=4096))(x, rows).kernels
    facts = {f.kind.id: f.facts for f in kernel.findings}
    assert facts["copy"]["path"] == "cp.async"
    assert facts["copy"]["bytes"] == 4 * 1024 * 4
    assert facts["short-ring"]["bytes_per_iteration"] == 4 * 1024 * 4
    assert facts["occupancy"]["bytes_under_way"] <= 50_000 * kernel.ctas_per_sm


@pytest.mark.parametrize("rows", [4, 40])
def test_more_slots_are_asked_for_where_smem_has_room_for_them(rows):
    def body(x, o):
        @plgpu.loop(
            0, 64, init_carry=jnp.zeros((rows, 1024)), num_stages=1 + (rows < 9)
        )
        def total(i, acc):
            return acc + x[i]

        o[plgpu.program_id(0)] = total

    def copied(x, o, smem, full):
        @plgpu.loop(0, 64)
        def _(i):
            plgpu.copy_gmem_to_smem(x.at[i], smem, full)
            plgpu.barrier_wait(full)
            o[i] = smem[...]

    x = jax.ShapeDtypeStruct((64, rows, 1024), jnp.float32)
    out = jax.ShapeDtypeStruct((128, rows, 1024), jnp.float32)
    f = plgpu.pallas_call(body, out, grid=128)
    if rows > 9:
        scratch = [plgpu.SMEM((rows, 1024), jnp.float32), plgpu.Barrier()]
        f = plgpu.kernel(copied, out_type=x, scratch_types=scratch)
    (kernel,) = plgpu.explain(f)(x).kernels
    (ring,) = [f for f in kernel.slow if "slots" in f.facts]
    assert "3 slots" in ring.hint and "num_stages" in ring.hint
    assert ("smaller blocks" in ring.hint) == (rows > 9)


def test_what_indices_select_from_smem_is_not_called_slow():
    def body(x, rows, o, table):
        mine = plgpu.ds(plgpu.program_id(0) * 4096, 4096)
        table[...] = x[...]
        o[mine] = table[rows[mine]]

    x, rows = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (256, 1 << 20))
    call = plgpu.pallas_call(
        body, rows, grid=256, scratch_shapes=[plgpu.SMEM((256,), jnp.int32)]
    )
    (kernel,) = plgpu.explain(call)(x, rows).kernels
    assert "access" in [f.kind.id for f in kernel.findings]
    assert not kernel.slow


def test_a_few_elements_of_a_column_are_no_warning(recwarn):
    def body(table, o):
        o[plgpu.program_id(0)] = table[:, plgpu.program_id(0)]

    table = jax.ShapeDtypeStruct((8, 512), jnp.int32)
    out = jax.ShapeDtypeStruct((512, 8), jnp.int32)
    offline.lower(plgpu.pallas_call(body, out, grid=512), table)
    assert not list(recwarn)


def test_a_target_has_its_own_instructions():
    a = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    (kernel,) = plgpu.explain(ops.matmul, target="sm_100a")(a, a).kernels
    used = {f.facts["instruction"] for f in kernel.findings if f.kind.id == "product"}
    assert used == {"tcgen05.mma"}


def test_the_page_names_every_field_of_a_report():
    (table,) = re.findall(
        r"<!-- fields -->(.*?)<!-- end of fields -->", PAGE, re.DOTALL
    )
    named = set(re.findall(r"`report\.(\w+(?:\.\w+)?)`", table))
    own = {x.name for x in dataclasses.fields(offline.KernelReport)} - {"resources"}
    resources = {x.name for x in dataclasses.fields(Resources)} - {"target"}
    properties = {"instruction_counts"}
    assert named == own | properties | {f"resources.{name}" for name in resources}


def test_without_a_compiler_registers_are_not_known(monkeypatch, tmp_path, capsys):
    def missing(*_):
        raise errors.OfflineUnavailableError("no ptxas")

    monkeypatch.setattr(stages, "compiled_module", missing)
    case = CASES["uncoalesced access"]
    answer = plgpu.explain(case.make())(*case.shapes)
    assert not answer.is_complete
    assert answer.kernels[0].resources is None
    assert case.kind in [f.kind.id for f in answer.slow]
    (tmp_path / "one.py").write_text(
        "import jax, pallas_gpu as plgpu\n"
        "def body(x, o):\n    o[...] = x[...]\n"
        "f = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), 'float32'))\n"
    )
    arguments = ["explain", f"{tmp_path}/one.py:f", "--shapes", "f32[128]"]
    assert main([*arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["complete"] is False


def test_what_explain_says_is_no_warning_too():
    case = CASES["uncoalesced access"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.PerformanceWarning)
        plgpu.explain(case.make())(*case.shapes)


WARNINGS = {
    "uncoalesced access": "a load of GMEM is not coalesced",
    "loads at computed indices": "bytes that threads load from GMEM",
    "a spill in a loop": "in an iteration of the loop",
    "bank conflicts": "bank conflicts",
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_has_the_line(name, recwarn):
    case = CASES[name]
    plgpu.offline.compile(case.make(), *case.shapes)
    said = [w for w in recwarn if WARNINGS[name] in str(w.message)]
    lines = {(w.filename.rpartition("/")[2], w.lineno) for w in said}
    assert lines == {("slow_kernels.py", case.line)}


def test_what_is_slow_in_ready_kernels_is_no_warning():
    row = test_compiled.OTHERS["linear, 16 tokens, int8, groups True"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.PerformanceWarning)
        plgpu.offline.lower(row.call, *row.args)


def test_a_warning_does_not_advise_a_copy_ahead_that_the_loop_refuses():
    def body(a, b, o):
        def step(i, acc):
            # Each iteration loads b again, and so loads of a stay as well.
            x, y = a[plgpu.ds(i * 64, 64)], b[...]
            return acc + jnp.dot(x, y, preferred_element_type=jnp.float32)

        o[...] = lax.fori_loop(0, 16, step, jnp.zeros((64, 64), jnp.float32))

    f = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32))
    args = [jax.ShapeDtypeStruct((rows, 64), jnp.bfloat16) for rows in (1024, 64)]
    with pytest.warns(errors.PerformanceWarning, match="waits for") as said:
        plgpu.offline.lower(f, *args)
    (answer,) = plgpu.explain(f)(*args).kernels
    hints = [str(w.message) for w in said]
    hints += [x.hint for x in answer.slow if x.kind.id == "unpipelined-loads"]
    assert len(hints) == 3
    for hint in hints:
        assert "num_stages" not in hint
        assert "each iteration loads the same: load it before the loop" in hint
