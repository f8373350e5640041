# SPDX-License-Identifier: Apache-2.0
"""The store of compilations: what is found again, what is not, what may fail."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
import zlib
from pathlib import Path

import jax
import pytest

from pallas_gpu import errors
from pallas_gpu.runtime import environment, offline_compiler, store, worker
from pallas_gpu.runtime.serialize import SerializedModule

MODULE = SerializedModule(b"module", b"0" * 32)
VECTOR = [((128,), "float32")]
OUTPUT = worker.CompilerOutput("ptx", "report", "sass")
FILE = "0" * 64 + ".compilation"


class Worker(worker.Worker):
    """Compiles without a child, and counts."""

    count = 0

    def compile(self, serialized, **_) -> worker.CompilerOutput:
        self.count += 1
        return OUTPUT if self.disassemble else dataclasses.replace(OUTPUT, sass=None)


def request(
    target="sm_90a", module=MODULE, operands=VECTOR, name="kernel", using=Worker, **kw
) -> tuple[int, worker.CompilerOutput]:
    """A new worker's number of compilations, and what it gives."""
    owner = using(target, **kw)
    output = store.compile_stored(owner, module, name, operands, VECTOR)
    return owner.count, output


def compiles(*args, **kw) -> bool:
    return request(*args, **kw)[0] == 1


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PALLAS_GPU_COMPILATIONS_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


def program(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


def installation(root: Path) -> environment.CudaInstallation:
    for name in ("plugin/version.py", "pjrt/version.py", "pjrt/xla_cuda_plugin.so"):
        program(root / name, "1.0")
    program(root / environment.LIBDEVICE, "libdevice")
    return environment.CudaInstallation(
        plugin=root / "plugin",
        runtime_library=root / "plugin/libmosaic_gpu_runtime.so",
        pjrt=root / "pjrt",
        cuda_root=root,
        wheel_bin=root / "bin",
        ptxas=program(root / "bin/ptxas", "13.0"),
        nvdisasm=program(root / "bin/nvdisasm", "13.2"),
    )


@pytest.fixture(autouse=True)
def cuda(request, tmp_path, monkeypatch) -> Path:
    """The folder of an installation that has the files that are looked at."""
    if request.node.get_closest_marker("offline") is None:
        for name in ("MOSAIC_GPU_CUDA_ROOT", "MOSAIC_GPU_RUNTIME_LIB_PATH"):
            monkeypatch.delenv(name, raising=False)
        found = installation(tmp_path / "cuda")
        monkeypatch.setattr(environment, "find_cuda", lambda: found)
    return tmp_path / "cuda"


@pytest.mark.offline
@pytest.mark.sass
def test_what_is_stored_starts_no_child(place, serialize_body, monkeypatch):
    owner = worker.worker_for("sm_90a")
    arguments = serialize_body(), "exp_plus_one", VECTOR, VECTOR
    first = store.compile_stored(owner, *arguments)
    monkeypatch.setattr(worker.Worker, "_start", None)
    owner.close()
    assert store.compile_stored(owner, *arguments) == first
    assert ".entry" in first.ptx and "Used" in first.ptxas


def test_every_module_that_is_compiled_offline_is_stored(place, monkeypatch):
    monkeypatch.setattr(worker, "Worker", Worker)
    monkeypatch.setattr(worker, "_workers", {})
    monkeypatch.setenv("PALLAS_GPU_KEEP", "ptx")
    monkeypatch.setenv("PALLAS_GPU_DUMP_DIR", str(place))
    aval = jax.ShapeDtypeStruct((128,), "float32")
    types = {"operand_avals": [aval], "result_avals": [aval]}
    offline_compiler.keep_device_code(MODULE, name="k", target="sm_100a", **types)
    assert not compiles("sm_100a")


def test_a_request_is_served_whatever_its_name_and_debugging(place, monkeypatch):
    assert request() == (1, OUTPUT)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", "/tmp")
    assert request(name="other") == (0, OUTPUT)


def test_an_installation_elsewhere_compiles_alike(place, tmp_path, monkeypatch):
    assert compiles()
    found = installation(tmp_path / "other")
    monkeypatch.setattr(environment, "find_cuda", lambda: found)
    assert not compiles()


@pytest.mark.parametrize(
    "other",
    [
        {"target": "sm_100a"},
        {"module": SerializedModule(b"module", b"1" * 32)},
        {"operands": [((128,), "int32")]},
        {"operands": []},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_request_is_compiled(place, other):
    assert compiles()
    assert compiles(**other)


@pytest.mark.parametrize(
    "file",
    ["bin/ptxas", "bin/nvdisasm", "plugin/version.py", "pjrt/version.py",
     "pjrt/xla_cuda_plugin.so", environment.LIBDEVICE],
)  # fmt: skip
def test_another_version_compiles_again(place, cuda, file):
    assert compiles()
    program(cuda / file, "a later version")
    assert compiles()
    assert not compiles()


@pytest.mark.parametrize(
    ("owner", "name"), [(store.jax, "__version__"), (store.jaxlib, "__version__")]
)
def test_another_jax_compiles_again(place, monkeypatch, owner, name):
    assert compiles()
    monkeypatch.setattr(owner, name, "99")
    assert compiles()


def test_another_setting_of_the_plugin_compiles_again(place, monkeypatch):
    assert compiles()
    monkeypatch.setenv("MOSAIC_GPU_NVSHMEM_BC_PATH", "/nvshmem.bc")
    assert compiles()


def test_sass_serves_a_request_without_and_not_the_other_way(place):
    without = dataclasses.replace(OUTPUT, sass=None)
    assert request(disassemble=False) == (1, without)
    assert request(disassemble=True) == (1, OUTPUT)
    for file in place.iterdir():  # that with SASS alone
        if store.load(file) == without:
            file.unlink()
    assert request(disassemble=False) == (0, without)
    assert request(disassemble=True) == (0, OUTPUT)


def test_a_disassembler_that_fails_is_asked_again(place):
    class Failing(Worker):
        def compile(self, serialized, **_):
            self.count += 1
            return dataclasses.replace(OUTPUT, sass=None)

    assert compiles(using=Failing)
    assert not compiles(disassemble=False)
    assert request() == (1, OUTPUT)


def test_what_does_not_compile_is_not_stored(place):
    class Refusing(Worker):
        def compile(self, serialized, **_):
            raise errors.CompilationError("no")

    with pytest.raises(errors.CompilationError, match="no"):
        request(using=Refusing)
    assert not place.exists()
    assert compiles()


@pytest.mark.parametrize("missing", ["bin/ptxas", "plugin/version.py"])
def test_without_a_known_toolchain_nothing_is_stored(place, cuda, missing):
    (cuda / missing).unlink()
    program(cuda / "bin/ptxas", "13; exit 1")
    assert compiles() and compiles()
    assert not place.exists()


def test_the_folder_is_the_users_and_can_be_turned_off(tmp_path, monkeypatch):
    assert store.folder() is None
    assert compiles() and compiles()
    monkeypatch.delenv("PALLAS_GPU_COMPILATIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert store.folder() == tmp_path / "caches/pallas_gpu/compilations"
    assert compiles() and not compiles()


DAMAGES = {
    "empty": lambda content: b"",
    "torn": lambda content: content[: len(content) // 2],
    "zeros at the end": lambda content: content[:-4] + bytes(4),
    "one bit": lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:],
    "longer": lambda content: content + b"\0",
    "text": lambda content: b"#!/bin/sh\n",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_compiled_again_and_replaced(place, damage):
    assert compiles()
    (file,) = place.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert request() == (1, OUTPUT)
    assert request() == (0, OUTPUT)


def test_an_entry_under_another_key_is_a_damaged_one(place):
    store.save(place / FILE, OUTPUT)
    other = place / FILE.replace("0", "1")
    other.write_bytes((place / FILE).read_bytes())
    assert (store.load(place / FILE), store.load(other)) == (OUTPUT, None)


OTHERS = [b"", *map(zlib.compress, [b"", b"[]", b"{}", b'{"ptx": 1, "other": 2}'])]


@pytest.mark.parametrize("packed", OTHERS, ids=range(len(OTHERS)))
def test_an_entry_of_another_form_is_a_damaged_one(place, packed):
    place.mkdir()
    (place / FILE).write_bytes(store._checksum(place / FILE, packed) + packed)
    assert store.load(place / FILE) is None


def test_a_folder_that_cannot_be_made_or_read_changes_nothing(place):
    place.write_text("a file")
    assert request() == request() == (1, OUTPUT)
    place.unlink()
    assert compiles()
    (file,) = place.iterdir()
    file.unlink()
    file.mkdir()
    assert request() == request() == (1, OUTPUT)


def test_a_full_disk_changes_nothing_and_leaves_nothing(place, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert request() == request() == (1, OUTPUT)
    assert list(place.iterdir()) == []


def write(file: Path, text: str) -> None:
    if text == "killed":
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(100):
        store.save(file, dataclasses.replace(OUTPUT, ptx=text * 9999))


@pytest.mark.filterwarnings("ignore:.*fork")  # these children use no threads
def test_writers_at_once_and_one_that_is_killed_break_nothing(place):
    file = place / FILE
    fork = multiprocessing.get_context("fork")
    texts = ("a", "b", "killed")
    writers = [fork.Process(target=write, args=(file, text)) for text in texts]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        output = store.load(file)
        assert output is not None or not seen, "an entry was there and is not"
        seen |= {output.ptx} if output else set()
    assert [writer.exitcode for writer in writers] == [0, 0, -signal.SIGKILL]
    assert seen <= {"a" * 9999, "b" * 9999}
    left = [path for path in place.iterdir() if path != file]
    assert len(left) == 1 and store.load(file) is not None
    # An hour later no process writes it.
    store.prune(place, store.LIMIT_BYTES)
    assert left[0].exists()
    os.utime(left[0], (0, time.time() - 3700))
    store.prune(place, store.LIMIT_BYTES)
    assert list(place.iterdir()) == [file]


def test_the_least_recently_used_go_until_a_quarter_is_free(place):
    files = [place / f"{n:064x}.compilation" for n in range(8)]
    for n, file in enumerate(files):
        store.save(file, OUTPUT)
        os.utime(file, (n, n))
    foreign = place / "notes.txt"
    foreign.write_text("not of the store")
    size = files[0].stat().st_size
    store.prune(place, 8 * size)
    assert all(file.exists() for file in files)
    assert store.load(files[1]) == OUTPUT  # it is the last one used
    store.prune(place, 8 * size - 1)
    assert [n for n, file in enumerate(files) if file.exists()] == [1, 4, 5, 6, 7]
    assert foreign.exists()


def test_one_write_of_256_prunes(place, monkeypatch):
    pruned = []
    monkeypatch.setattr(store, "prune", lambda *args: pruned.append(args))
    for n in range(256):
        store.save(place / f"{n:02x}{FILE[2:]}", OUTPUT)
    assert pruned == [(place, 256 << 20)]
