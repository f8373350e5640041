# SPDX-License-Identifier: Apache-2.0
"""What the offline compiler's child process is started with."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pallas_gpu.runtime import child_environment as child_environment_module
from pallas_gpu.runtime.child_environment import child_environment


def test_child_takes_no_settings_that_change_its_output():
    env = child_environment(
        {
            "PATH": "/usr/bin",
            "XLA_FLAGS": "--xla_dump_to=x",
            "JAX_PLATFORMS": "cuda",
            "JAX_COMPILATION_CACHE_DIR": "/cache",
            "MOSAIC_GPU_DUMP_TO": "/x",
            "HOME": "/home/me",
        }
    )
    assert env["JAX_PLATFORMS"] == "cpu" and env["HOME"] == "/home/me"
    assert not {"XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "MOSAIC_GPU_DUMP_TO"} & {*env}


def test_disassembled_files_are_cleared_away_and_others_stay(tmp_path):
    fake = tmp_path / "real nvdisasm"
    fake.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    fake.chmod(0o755)
    left = Path("/tmp/mosaic-gpu-t3stXY/kernel.bin")
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"cubin")
    other = tmp_path / "kernel.bin"
    other.write_bytes(b"cubin")
    assert child_environment_module._write_tidy_nvdisasm(fake, tmp_path)
    done = subprocess.run(
        [tmp_path / "nvdisasm", "-c", left, other], capture_output=True, text=True
    )
    assert done.stdout == f"-g -c {left} {other}\n"
    assert done.returncode == 3
    assert not left.parent.exists()
    assert other.exists()


def test_a_child_that_shall_not_disassemble_is_not_told_to():
    plain = child_environment({}, disassemble=False)
    assert "MOSAIC_GPU_DUMP_SASS_CTRL" not in plain
    assert plain["MOSAIC_GPU_DUMP_PTX"] == "1"
