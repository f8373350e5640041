# SPDX-License-Identifier: Apache-2.0
"""Kept stages: which, where, under which name."""

from __future__ import annotations

import pytest

import pallas_gpu as plgpu
from pallas_gpu import compiler, errors
from pallas_gpu.runtime import dumps
from tests.support.entry_kernels import make, numbers


def copy(x, o):
    o[...] = x[...]


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
    for name in ("jaxpr", "program", "layouts", "mlir", "ptx", "ptxas", "sass"):
        assert name in compiler.TEXTS
    assert "'llvm'" in str(info.value)


def test_unknown_stage_in_a_call_is_an_error():
    with pytest.raises(errors.ArgumentError, match="unknown stage"):
        dumps.dump("cubin", "kernel", "text")


# --- files that cannot be written -----------------------------------------------------


def keep_one(name="kernel"):
    """Keeps a text, which has to be a warning and no error."""
    with pytest.warns(UserWarning, match=r"cannot write .*PALLAS_GPU_DUMP_DIR"):
        assert dumps.dump("mlir", name, "text") is None


@pytest.fixture
def keep(monkeypatch):
    monkeypatch.setenv("PALLAS_GPU_KEEP", "mlir")
    return lambda folder: monkeypatch.setenv("PALLAS_GPU_DUMP_DIR", str(folder))


def test_a_folder_that_cannot_be_made_is_a_warning(keep, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/kept"):
        keep(folder)
        keep_one()


def test_an_overlong_folder_is_a_warning(keep, tmp_path):
    keep(tmp_path / ("x" * 300))
    keep_one()


def test_a_full_disk_is_a_warning(keep, tmp_path):
    keep(tmp_path)
    (tmp_path / "kernel.0.mlir").symlink_to("/dev/full")
    keep_one()


@pytest.mark.parametrize("name", ["x" * 5000, "é" * 200, "日本語" * 100, "\ud800"])
def test_any_kernel_name_makes_a_file_name(keep, folder, name):
    keep(folder)
    path = dumps.dump("mlir", name, "text")
    assert path.parent == folder
    assert path.read_text() == "text"


def test_a_text_is_kept_in_utf_8_whatever_it_contains(keep, folder):
    keep(folder)
    path = dumps.dump("mlir", "kernel", "é \ud800")
    assert path.read_bytes() == "é \\ud800".encode()


def test_a_kernel_whose_dumps_cannot_be_written_runs(keep, tmp_path):
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file")
    with pytest.warns(UserWarning, match="cannot write"):
        assert plgpu.offline.lower(make(copy), numbers())


def test_an_error_is_reported_from_a_folder_that_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    def body(x, o):
        o[...] = x[...] + x[plgpu.ds(0, 32)]

    with pytest.raises(errors.ShapeError, match=r"test_dumps.py:\d+"):
        make(body)(numbers())
    with pytest.raises(errors.OutOfBoundsError, match=r"test_dumps.py:\d+"):
        make(lambda x, o: o.set(x[plgpu.ds(32, 64)]))(numbers())
