# SPDX-License-Identifier: Apache-2.0
"""PALLAS_GPU_KEEP=layouts: the layout of each value below its source line."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tools.source_tree import ROOT

STRIDED = plgpu.Layout.WG_STRIDED((64, 128), vec_size=4)
X = np.zeros((64, 128), np.float32)


def body(x_ref, o_ref, tile):
    x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA)
    tile[...] = x
    y = x - jnp.max(x, axis=1, keepdims=True)
    o_ref[...] = plgpu.layout_cast(2 * y, STRIDED)


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """The lines that `PALLAS_GPU_KEEP=layouts` writes of the kernel above."""
    monkeypatch.setenv("PALLAS_GPU_KEEP", "layouts")
    monkeypatch.setenv("PALLAS_GPU_DUMP_DIR", str(tmp_path))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(X.shape, X.dtype),
        scratch_types=[plgpu.SMEM(X.shape, X.dtype)],
        name="k",
    )
    plgpu.offline.lower(kernel, X)
    return (tmp_path / "k.0.layouts").read_text(encoding="utf-8").splitlines()


def columns(line):
    return tuple(re.split(r" {2,}", line.strip()))


def below(lines, source):
    """The rows below a line of the source."""
    heads = [i for i, line in enumerate(lines) if line.endswith(f"  {source}")]
    (head,) = heads
    rows = []
    for line in lines[head + 1 :]:
        if not line.startswith("    "):
            break
        rows.append(columns(line))
    return rows


def test_values_stand_below_their_lines_with_type_and_layout(listed):
    rows = below(listed, "x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA)")
    assert ("load", "float32[64, 128]", "Layout.WGMMA") in rows
    rows = below(listed, "y = x - jnp.max(x, axis=1, keepdims=True)")
    assert ("reduction", "float32[64]", "Layout.WGMMA_ROW") in rows
    assert ("sub", "float32[64, 128]", "Layout.WGMMA") in rows


def test_a_line_has_its_file_and_number(listed):
    (line,) = [line for line in listed if "tools" in line or "jnp.max" in line]
    assert re.match(r"tests/lowering/inference/test_listing\.py:\d+  y = x", line)


def test_arrays_in_smem_have_their_storage(listed):
    row = ("SMEM array", "float32[64, 128]", "tiling (8, 8), 32-byte swizzle")
    assert columns(listed[2]) == row
    assert listed[1] == "scratch of the kernel"


def test_a_relayout_has_an_arrow(listed):
    rows = below(listed, "o_ref[...] = plgpu.layout_cast(2 * y, STRIDED)")
    text = "Layout.WG_STRIDED((64, 128), vec_size=4)"
    arrows = [row for row in rows if row[0].startswith("->")]
    assert arrows == [("-> operand 1 of mul", "float32[64, 128]", text)]


def test_the_documents_show_rows_of_this_list(listed):
    page = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    shown = page.partition("PALLAS_GPU_KEEP=layouts")[2].partition("A row with")[0]
    rows = [line for line in shown.splitlines() if re.match(r" {8}\S", line)]
    known = [columns(line) for line in listed]
    assert len(rows) > 4
    assert [line for line in rows if columns(line) not in known] == []
