# SPDX-License-Identifier: Apache-2.0
"""Kept stages: which, where, under which name."""

from __future__ import annotations

import pytest

from pallas_gpu import compiler, errors
from pallas_gpu.runtime import dumps


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_GPU_DUMP_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_nothing_is_kept_by_default(monkeypatch, folder):
    monkeypatch.delenv("PALLAS_GPU_KEEP", raising=False)
    assert dumps.dump("mlir", "kernel", "text") is None
    assert not folder.exists()


def test_only_named_stages_are_kept(monkeypatch, folder):
    monkeypatch.setenv("PALLAS_GPU_KEEP", "mlir, ptx")
    assert dumps.dump("jaxpr", "kernel", "j") is None
    path = dumps.dump("mlir", "kernel", "m")
    assert path == folder / "kernel.0.mlir"
    assert path.read_text() == "m"


def test_kernels_of_one_name_are_numbered(monkeypatch):
    monkeypatch.setenv("PALLAS_GPU_KEEP", "ptx")
    names = [dumps.dump("ptx", "kernel", text).name for text in ("a", "b", "a")]
    assert names == ["kernel.0.ptx", "kernel.1.ptx", "kernel.0.ptx"]


def test_a_kernels_name_cannot_leave_the_folder(monkeypatch, folder):
    monkeypatch.setenv("PALLAS_GPU_KEEP", "ptx")
    path = dumps.dump("ptx", "../../<lambda>", "text")
    assert path.parent == folder


def test_unknown_stage_in_the_variable_lists_the_right_ones(monkeypatch):
    monkeypatch.setenv("PALLAS_GPU_KEEP", "mlir,llvm")
    with pytest.raises(errors.ArgumentError, match="PALLAS_GPU_KEEP") as info:
        dumps.is_kept("mlir")
    assert ", ".join(compiler.TEXTS) in str(info.value)
    for name in ("jaxpr", "warpgroup", "layouts", "mlir", "ptx", "ptxas", "sass"):
        assert name in compiler.TEXTS
    assert "'llvm'" in str(info.value)


def test_unknown_stage_in_a_call_is_an_error():
    with pytest.raises(errors.ArgumentError, match="unknown stage"):
        dumps.dump("cubin", "kernel", "text")
