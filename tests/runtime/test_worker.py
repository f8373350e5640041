# SPDX-License-Identifier: Apache-2.0
"""The offline compiler's child process: its answers, its errors, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pallas_gpu import errors
from pallas_gpu.runtime import environment, worker, worker_process

pytestmark = pytest.mark.sass

VECTOR = [((128,), "float32")]
ROOT = Path(__file__).parents[2]


def compile_with(owner: worker.Worker, serialized) -> worker.CompilerOutput:
    return owner.compile(serialized, name="kernel", operands=VECTOR, results=VECTOR)


@pytest.fixture(scope="module")
def shared_worker() -> worker.Worker:
    return worker.worker_for("sm_90a")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_one_worker_serves_a_target():
    assert worker.worker_for("sm_90a") is worker.worker_for("sm_90a")
    assert worker.worker_for("sm_90a") is not worker.worker_for("sm_100a")


@pytest.mark.offline
def test_output_is_ptx_report_and_sass(shared_worker, serialize_body):
    output = compile_with(shared_worker, serialize_body())
    assert ".target sm_90a" in output.ptx and output.ptx.endswith("\n")
    assert "Used" in output.ptxas and ".entry" not in output.ptxas
    assert output.sass is None or "EXIT" in output.sass


@pytest.mark.offline
def test_equal_modules_give_equal_output_each_time(shared_worker, serialize_body):
    first = compile_with(shared_worker, serialize_body())
    assert compile_with(shared_worker, serialize_body()) == first


@pytest.mark.offline
def test_compiling_leaves_no_files(shared_worker, serialize_body):
    compile_with(shared_worker, serialize_body())
    opened = time.time()
    compile_with(shared_worker, serialize_body(name="leaves_no_files"))
    left = [
        path
        for path in Path("/tmp").glob("mosaic-gpu-*/kernel.bin")
        if path.stat().st_mtime >= opened - 1
        and b"leaves_no_files" in path.read_bytes()
    ]
    assert left == []


@pytest.mark.offline
def test_kernel_without_operands_compiles(shared_worker, serialize_body):
    output = shared_worker.compile(
        serialize_body(), name="kernel", operands=[], results=VECTOR * 2
    )
    assert ".entry" in output.ptx


@pytest.mark.offline
def test_what_ptxas_refuses_comes_back_with_its_ptx_line(shared_worker, serialize_body):
    body = 'llvm.inline_asm "frobnicate $0, $1;", "=f,f" %w : (f32) -> f32'
    with pytest.raises(errors.CompilationError) as info:
        compile_with(shared_worker, serialize_body(body))
    text = str(info.value)
    assert "kernel 'kernel' does not compile for sm_90a" in text
    assert "Not a name of any known instruction: 'frobnicate'" in text
    assert "PTX line" in text and "frobnicate %" in text


@pytest.mark.offline
def test_what_mlir_refuses_comes_back_and_the_worker_lives(
    shared_worker, serialize_body
):
    compile_with(shared_worker, serialize_body())
    pid = shared_worker.pid
    body = "builtin.unrealized_conversion_cast %i : i32 to f32"
    with pytest.raises(errors.CompilationError, match="does not compile") as info:
        compile_with(shared_worker, serialize_body(body))
    assert "unrealized_conversion_cast" in str(info.value)
    assert shared_worker.pid == pid


@pytest.mark.offline
def test_dead_worker_is_replaced(serialize_body):
    own = worker.Worker("sm_90a")
    first = compile_with(own, serialize_body())
    pid = own.pid
    os.kill(pid, signal.SIGKILL)
    own._process.wait()
    assert compile_with(own, serialize_body()) == first
    assert own.pid not in (None, pid)
    own.close()


@pytest.mark.offline
def test_too_slow_a_compile_is_stopped_and_said(serialize_body):
    own = worker.Worker("sm_90a", timeout_seconds=0.001)
    with pytest.raises(errors.CompilationError, match=r"took longer than 0\.001 s"):
        compile_with(own, serialize_body())
    assert own.pid is None


def test_child_that_dies_while_compiling_shows_its_last_words(
    serialize_body, tmp_path, monkeypatch
):
    program = tmp_path / "dies.py"
    program.write_text("import sys, os\nsys.exit('LLVM ERROR: out of ideas')\n")
    monkeypatch.setattr(worker, "_PROGRAM", program)
    monkeypatch.setattr(environment, "require_offline", lambda found: None)
    own = worker.Worker("sm_90a")
    with pytest.raises(errors.CompilationError, match="died") as info:
        compile_with(own, serialize_body())
    assert "LLVM ERROR: out of ideas" in str(info.value)
    assert "exit code 1" in str(info.value)


ANSWERS = """
import os, sys
sys.path.insert(0, {folder!r})
from worker_process import pack_message, read_message
while read_message(sys.stdin.buffer) is not None:
    output = f".entry {{os.getpid()}}\\nptxas info"
    sys.stdout.buffer.write(pack_message({{"ok": True, "output": output}}))
    sys.stdout.buffer.flush()
"""


def test_another_child_replaces_one_after_a_number_of_kernels(
    serialize_body, tmp_path, monkeypatch
):
    # A child that answers with its process id, and needs no CUDA.
    program = tmp_path / "answers.py"
    program.write_text(ANSWERS.format(folder=str(Path(worker_process.__file__).parent)))
    monkeypatch.setattr(worker, "_PROGRAM", program)
    monkeypatch.setattr(environment, "require_offline", lambda found: None)
    own = worker.Worker("sm_90a", compilations=2)
    children = [compile_with(own, serialize_body()).ptx for _ in range(4)]
    assert own.pid is None
    assert children[0] == children[1] != children[2] == children[3]


def test_missing_packages_are_said_before_anything_starts(serialize_body, monkeypatch):
    nothing = environment.CudaInstallation(None, None, None, None, None, None, None)
    monkeypatch.setattr(environment, "find_cuda", lambda: nothing)
    own = worker.Worker("sm_90a")
    with pytest.raises(
        errors.OfflineUnavailableError, match="packages that are missing"
    ):
        compile_with(own, serialize_body())
    assert own.pid is None


def test_child_ends_with_its_parent():
    # No compile and no CUDA: the child waits for its first request.
    script = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-P', sys.argv[1]],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, worker_process.__file__],
        capture_output=True,
        text=True,
        check=True,
    )
    deadline = time.monotonic() + 10
    while is_running(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(int(done.stdout))


def test_output_without_sass_is_split_all_the_same():
    output = worker.split_output(
        "//\n.visible .entry k()\n\nptxas info    : Used 12 registers\n"
        "ptxas info    : Compile time = 2.3 ms\n"
    )
    assert output.sass is None
    assert output.ptxas == "ptxas info    : Used 12 registers\n"


def test_output_without_a_report_is_our_bug():
    with pytest.raises(errors.InternalError, match="no ptxas report"):
        worker.split_output("// nothing")


@pytest.mark.offline
def test_no_place_for_temporary_files_is_an_error_of_ours(
    serialize_body, monkeypatch, tmp_path
):
    owner = worker.Worker("sm_90a")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(errors.OfflineUnavailableError, match="cannot start") as info:
        compile_with(owner, serialize_body())
    assert "TMPDIR" in info.value.hint
    with pytest.raises(errors.OfflineUnavailableError, match="FileNotFoundError"):
        worker.Worker("sm_90a")
