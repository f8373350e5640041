# SPDX-License-Identifier: Apache-2.0
"""What the CUDA plugin is told before it compiles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pallas_gpu import errors
from pallas_gpu.runtime import environment


@pytest.mark.offline
def test_preparing_names_the_launcher_and_libdevice():
    environ: dict[str, str] = {}
    environment.prepare_environment(environ)
    assert Path(environ["MOSAIC_GPU_RUNTIME_LIB_PATH"]).is_file()
    root = Path(environ["MOSAIC_GPU_CUDA_ROOT"])
    assert (root / "nvvm/libdevice/libdevice.10.bc").is_file()


@pytest.mark.offline
def test_preparing_puts_ptxas_on_an_empty_path():
    environ = {"PATH": ""}
    environment.prepare_environment(environ)
    folders = environ["PATH"].split(os.pathsep)
    assert any((Path(folder) / "ptxas").exists() for folder in folders)
    assert "" not in folders


def test_preparing_keeps_what_the_user_has_set():
    environ = {"MOSAIC_GPU_RUNTIME_LIB_PATH": "/mine.so", "MOSAIC_GPU_CUDA_ROOT": "/me"}
    environment.prepare_environment(environ)
    assert environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] == "/mine.so"
    assert environ["MOSAIC_GPU_CUDA_ROOT"] == "/me"


def test_preparing_twice_changes_nothing_more():
    environ = {"PATH": "/usr/bin"}
    environment.prepare_environment(environ)
    once = dict(environ)
    environment.prepare_environment(environ)
    assert environ == once


def test_a_toolkit_on_path_stays_in_front_unless_pinned(tmp_path):
    for program in ("ptxas", "nvdisasm"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    environment.prepare_environment(environ)
    assert environ["PATH"] == str(tmp_path)


@pytest.mark.offline
def test_pinned_tools_come_first_where_pip_has_them():
    found = environment.find_cuda()
    if found.wheel_bin is None:
        pytest.skip("ptxas comes from a toolkit here, not from pip")
    environ = {"PATH": "/usr/bin"}
    environment.prepare_environment(environ, pinned_tools=True)
    assert environ["PATH"].split(os.pathsep)[0] == str(found.wheel_bin)


def test_missing_packages_are_named_with_the_extra_to_install():
    nothing = environment.CudaInstallation(None, None, None, None, None, None, None)
    with pytest.raises(errors.OfflineUnavailableError) as info:
        environment.require_offline(nothing)
    text = str(info.value)
    assert "pip install 'pallas-gpu[offline]'" in text
    assert "not found: JAX's CUDA plugin (jax-cuda13-plugin)" in text
