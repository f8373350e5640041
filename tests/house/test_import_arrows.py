# SPDX-License-Identifier: Apache-2.0
"""Imports run upward only, and the doors to JAX are where the architecture puts them.

The imports are read from the source: importing jax loads modules of its own that no
list of loaded modules could tell from ours. Imports inside functions count too, an
arrow that runs back at run time is one all the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.source_tree import ROOT, python_files, syntax_tree

_GROUND = ("findings", "errors", "expect", "arch", "layouts", "_jax")
_TYPES = (*_GROUND, "types")
_PRIMITIVES = (*_TYPES, "primitives")
_PROGRAM = (*_PRIMITIVES, "program")
_READERS = (*_PROGRAM, "resources", "checks", "memory")
_ENTRY = (*_READERS, "timeline", "entry")
_LOWERING = (*_ENTRY, "emitters", "lowering")

# Which rooms a room may import, itself aside. emitters/ emits instructions and never
# sees a jaxpr, so it stands beside primitives/ and entry/, not above them; pipeline/
# and ops/ are written on what users have, so nothing of the compiler is open to them.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "findings": (),
    "errors": ("findings",),
    "expect": ("errors",),
    "arch": ("errors", "expect"),
    "layouts": ("errors", "expect"),
    "_jax": ("errors",),
    "types": _GROUND,
    "primitives": _TYPES,
    "program": _PRIMITIVES,
    # What a profiled launch recorded, as a table, a text and a picture.
    "timeline": ("errors", "expect", "types"),
    # The planner reads a program for the scopes that allocate.
    "resources": _PROGRAM,
    # What holds of every correct kernel: each check reads the program.
    "checks": _PROGRAM,
    # Which arrays share memory, what orders their accesses, what a launch adds.
    "memory": (*_PROGRAM, "resources"),
    "entry": (*_READERS, "timeline"),
    # What operations consist of: written on the entry points.
    "composites": _ENTRY,
    "emulator": _ENTRY,
    "emitters": _TYPES,
    "lowering": (*_ENTRY, "emitters"),
    "compiler": _LOWERING,
    "runtime": (*_LOWERING, "compiler"),
    # The machine that runs emitted code; what it does it has from the PTX ISA alone
    # (tests/lockstep/test_independence.py).
    "lockstep": (*_ENTRY, "compiler"),
    "offline": (*_LOWERING, "compiler", "runtime"),
    # Measurement and tuning: above the offline compiler, beside the pipelines.
    "testing": (*_LOWERING, "compiler", "runtime", "offline"),
    # Upstream's names for what others have.
    "profiler": ("testing", "timeline", "types"),
    # Checks: what people and programs ask the emulator, by Python or a command line.
    "verdict": (*_ENTRY, "emulator"),
    # Why kernels are slow: what was emitted and compiled, and the cost model.
    "explanation": (*_LOWERING, "compiler", "runtime", "offline", "testing"),
    "__main__": (*_LOWERING, "runtime", "offline", "verdict", "explanation"),
    "pipeline": _ENTRY,
    # The second machine, from its types to its launches: a user of the engines. None of
    # them knows it.
    "sparsecore": (
        *_LOWERING,
        "compiler",
        "runtime",
        "emulator",
        "offline",
        "pipeline",
    ),
    # What receives kernels of others turns them into calls of ours; PyTorch gets them
    # compiled.
    "bridge": (*_LOWERING, "compiler", "runtime", "pipeline"),
    # The Mosaic-level door: a face of emitters/ for bodies that emit MLIR themselves.
    # It has the profiler and the way to PyTorch under upstream's names.
    "mosaic": (*_LOWERING, "compiler", "runtime", "bridge", "profiler"),
    # Ready kernels are written on the public names, as their users would.
    "ops": ("errors", "expect", "arch"),
}
# Inner rooms that may import less than the room around them: modules by their names.
# The emulator's engine runs jaxprs with effects on any machine; of ours it knows
# how rules are registered, what a program is, and which of its values are indices.
INNER_ROOMS: dict[str, tuple[str, ...]] = {
    "pallas_gpu.emulator.engine": (
        "pallas_gpu.errors",
        "pallas_gpu.findings",
        "pallas_gpu._jax",
        "pallas_gpu.layouts.window",
        "pallas_gpu.primitives._registry",
        "pallas_gpu.program",
    ),
}
PURE_PYTHON_ROOMS = ("findings", "errors", "expect", "arch", "layouts")
MLIR_ROOMS = ("emitters", "lowering", "compiler", "runtime", "lockstep", "mosaic")
# Of SparseCores the rooms `lowering`, `emitters` and `runtime`.
MLIR_ROOMS += ("sparsecore",)
PEERS = ("jax.experimental.pallas", "jax._src.pallas", "jax.experimental.mosaic")
# The whole of a string that could be handed to importlib.
_MODULE_NAME = re.compile(r"jax(lib)?(\.\w+)+")


def room_of(name: str) -> str:
    """The room of a file or of a dotted module of the package."""
    parts = re.split(r"[/.]", name.removesuffix(".py"))
    return parts[1] if len(parts) > 1 else "__init__"


def imported_names(tree: ast.Module, file: str) -> Iterator[tuple[int, str]]:
    """Every dotted name a file imports or writes out as `jax.x.y`, with its line."""
    package = file.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                above = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*above, *([node.module] if node.module else [])])
                yield from ((node.lineno, f"{module}.{a.name}") for a in node.names)
            case ast.Attribute():
                if (name := _dotted(node)).startswith(("jax.", "jaxlib.")):
                    yield node.lineno, name
            case ast.Constant(value=str(text)) if _MODULE_NAME.fullmatch(text):
                yield node.lineno, text


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            return f"{_dotted(value)}.{attribute}"
    return ""


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def complaint(file: str, name: str, rooms: set[str]) -> str | None:
    """What is wrong with a file of the package importing a name, None if nothing."""
    room = room_of(file)
    if any(_is_in(name, peer) for peer in PEERS):
        return f"{name} is the peer, the package never imports it"
    if _is_in(name, "jax._src") and file != "pallas_gpu/_jax.py":
        return f"{name}: jax._src has one door, pallas_gpu/_jax.py"
    if _is_in(name, "jaxlib.mlir") and room not in MLIR_ROOMS:
        return f"{name}: MLIR is for {', '.join(MLIR_ROOMS)}"
    if re.match(r"jax(lib)?(\.|$)", name) and room in PURE_PYTHON_ROOMS:
        return f"{name}: {room} knows nothing of JAX"
    if not _is_in(name, "pallas_gpu") or room == "__init__":
        return None
    target = room_of(name)
    if target not in rooms:  # `from pallas_gpu import kernel`, a name and no room
        if room == "ops":
            return None
        return f"{name}: nothing inside imports the public names at the top"
    if target not in (room, *MAY_IMPORT[room]):
        return f"{name}: {room} may not import {target}"
    return None


def inner_complaint(file: str, name: str) -> str | None:
    """What is wrong with a file of an inner room importing a name."""
    module = file.removesuffix(".py").replace("/", ".")
    for inner, allowed in INNER_ROOMS.items():
        if not _is_in(module, inner) or not _is_in(name, "pallas_gpu"):
            continue
        if not any(_is_in(name, other) for other in (inner, *allowed)):
            return f"{name}: {inner} may not import it"
    return None


def arrow_complaints(root: Path) -> list[str]:
    """One line for every import of the package in `root` that breaks a rule."""
    files = [file for file in python_files(root) if file.startswith("pallas_gpu/")]
    rooms = {room_of(file) for file in files} - {"__init__"}
    found = [
        f"pallas_gpu/{room}: a room that is not in the picture (MAY_IMPORT)"
        for room in sorted(rooms - set(MAY_IMPORT))
    ]
    for file in files:
        if room_of(file) not in MAY_IMPORT and room_of(file) != "__init__":
            continue
        tree = syntax_tree((root / file).read_text())
        for line, name in imported_names(tree, file):
            text = complaint(file, name, rooms) or inner_complaint(file, name)
            if text is not None:
                found.append(f"{file}:{line}: {text}")
    return found


def circles(root: Path) -> list[tuple[str, str]]:
    """Pairs of files of the package that import each other, also inside functions."""
    files = [file for file in python_files(root) if file.startswith("pallas_gpu/")]
    of_module = {
        file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file
        for file in files
    }
    imports: set[tuple[str, str]] = set()
    for file in files:
        tree = syntax_tree((root / file).read_text())
        for _, name in imported_names(tree, file):
            # The last part of a name is a module, or something that a module defines.
            modules = (name, name.rpartition(".")[0])
            target = next((of_module[m] for m in modules if m in of_module), file)
            imports.add((file, target))
    return sorted((a, b) for a, b in imports if a < b and (b, a) in imports)


def test_no_two_files_import_each_other():
    assert circles(ROOT) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from pallas_gpu.types import barrier", "from pallas_gpu.types import refs"),
        ("from pallas_gpu.types.barrier import Barrier", "from . import refs"),
        ("def f():\n    from pallas_gpu.types import barrier", "from .refs import x"),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from pallas_gpu.types.barrier import Barrier",
            "import pallas_gpu.types.refs",
        ),
    ],
)
def test_two_files_that_import_each_other_are_found(tmp_path, first, second):
    _write(
        tmp_path / "pallas_gpu/types/__init__.py", "from pallas_gpu.types import refs"
    )
    _write(tmp_path / "pallas_gpu/types/refs.py", first)
    _write(tmp_path / "pallas_gpu/types/barrier.py", second)
    pair = ("pallas_gpu/types/barrier.py", "pallas_gpu/types/refs.py")
    assert circles(tmp_path) == [pair]


def test_a_file_that_imports_its_own_package_is_in_a_circle_with_it(tmp_path):
    _write(
        tmp_path / "pallas_gpu/types/__init__.py", "from pallas_gpu.types import refs"
    )
    _write(tmp_path / "pallas_gpu/types/refs.py", "from pallas_gpu import types")
    pair = ("pallas_gpu/types/__init__.py", "pallas_gpu/types/refs.py")
    assert circles(tmp_path) == [pair]


def test_imports_of_the_package_run_upward_and_use_the_right_doors():
    assert arrow_complaints(ROOT) == []


def test_every_room_imports_only_rooms_that_are_built_before_it():
    built: set[str] = set()
    for room, below in MAY_IMPORT.items():
        assert set(below) <= built, room
        built.add(room)


_BAD_FILES = {
    "an arrow that runs back": (
        "types/refs.py",
        "from pallas_gpu.lowering import context",
        "types may not import lowering",
    ),
    "a relative arrow that runs back": (
        "types/refs.py",
        "from ..lowering import context",
        "types may not import lowering",
    ),
    "an arrow inside a function": (
        "entry/call.py",
        "def f():\n    import pallas_gpu.emulator.run",
        "entry may not import emulator",
    ),
    "the emulator that hears of MLIR": (
        "emulator/run.py",
        "from jaxlib.mlir import ir",
        "MLIR is for",
    ),
    "a private door": (
        "primitives/tma.py",
        "from jax._src import core",
        "jax._src has one door",
    ),
    "a private door by attribute": (
        "primitives/tma.py",
        "import jax\nx = jax._src.core",
        "jax._src has one door",
    ),
    "a private door by importlib": (
        "primitives/tma.py",
        "import importlib\nimportlib.import_module('jax._src.core')",
        "jax._src has one door",
    ),
    "the emulator's engine that hears of the GPU": (
        "emulator/engine/threads.py",
        "from pallas_gpu.emulator.gpu.machine import cta",
        "pallas_gpu.emulator.engine may not import it",
    ),
    "the emulator's engine that hears of barriers": (
        "emulator/engine/threads.py",
        "from pallas_gpu import types",
        "pallas_gpu.emulator.engine may not import it",
    ),
    "the emulator's engine that hears of a family": (
        "emulator/engine/threads.py",
        "from pallas_gpu.primitives import tma",
        "pallas_gpu.emulator.engine may not import it",
    ),
    "the peer": ("_jax.py", "from jax.experimental import pallas", "the peer"),
    "jax in the layouts": ("layouts/tiled.py", "import jax", "knows nothing of JAX"),
    "the public names from inside": (
        "pipeline/loops.py",
        "from pallas_gpu import kernel",
        "nothing inside imports the public names",
    ),
    "a room nobody planned": ("helpers/x.py", "import math", "not in the picture"),
}


@pytest.mark.parametrize("case", _BAD_FILES)
def test_a_bad_import_is_found(tmp_path: Path, case: str):
    file, text, expected = _BAD_FILES[case]
    for name in ("lowering/context", "emulator/run", "types/refs", "primitives/tma"):
        _write(tmp_path / f"pallas_gpu/{name}.py", "")
    _write(tmp_path / "pallas_gpu" / file, text)
    found = arrow_complaints(tmp_path)
    assert found
    assert expected in found[0]


def test_a_good_tree_has_no_complaints(tmp_path: Path):
    _write(tmp_path / "pallas_gpu/errors.py", "import textwrap")
    _write(tmp_path / "pallas_gpu/_jax.py", "from jax._src import core")
    _write(tmp_path / "pallas_gpu/types/refs.py", "from .. import errors, _jax")
    _write(tmp_path / "pallas_gpu/emitters/tma.py", "from jaxlib.mlir import ir")
    _write(tmp_path / "pallas_gpu/__init__.py", "from pallas_gpu.types import refs")
    assert arrow_complaints(tmp_path) == []


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_one_module_looks_for_jaxprs_in_parameters():
    users = {
        path
        for path in python_files()
        if path.startswith("pallas_gpu/")
        and "jaxprs_in_params" in (ROOT / path).read_text(encoding="utf-8")
    }
    assert users == {"pallas_gpu/_jax.py", "pallas_gpu/program/bodies.py"}


# Whoever asks what a kernel does reads its program. Besides the program and the door to
# JAX one module sees equations: indices that are still being traced have no program.
ITERATE_EQUATIONS = {
    "pallas_gpu/_jax.py",
    "pallas_gpu/program/bodies.py",
    "pallas_gpu/program/simple.py",
    "pallas_gpu/program/marks.py",
    "pallas_gpu/program/rewrite.py",
    "pallas_gpu/primitives/indices/multiples.py",
}


def test_one_module_outside_of_the_program_iterates_over_equations():
    users = {
        path
        for path in python_files()
        if path.startswith("pallas_gpu/")
        and re.search(r"\beqns\b", (ROOT / path).read_text(encoding="utf-8"))
    }
    assert users == ITERATE_EQUATIONS


def test_what_is_known_of_values_has_one_lattice():
    # The cost model computes numbers, at one position of the launch.
    users = {
        path
        for path in python_files()
        if path.startswith("pallas_gpu/")
        and re.search(r"^class \w+\(Flow\b", (ROOT / path).read_text("utf-8"), re.M)
    }
    assert users == {"pallas_gpu/program/facts.py", "pallas_gpu/testing/work.py"}
