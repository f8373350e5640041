# SPDX-License-Identifier: Apache-2.0
"""Type checkers see the public API as it is: mypy, strict, and pyright.

They check what users write. README's and the tutorials' kernels have no annotations, so
mypy checks their bodies but not that they have any; the annotated sample is checked
without exceptions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.source_tree import ROOT

# The samples without annotations are named in it.
CONFIG = """
[mypy]
strict = true
[mypy-{samples}]
allow_untyped_defs = true
allow_incomplete_defs = true
allow_untyped_calls = true
check_untyped_defs = true
[mypy-pallas_gpu.*]
follow_imports = silent
[mypy-jax.*,jaxlib.*,ml_dtypes.*]
follow_imports = skip
ignore_missing_imports = true
"""

ANNOTATED = """
import jax
import jax.numpy as jnp
import pallas_gpu as plgpu
from typing import assert_type

@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((64, 128), jnp.float32),
    scratch_types=[plgpu.SMEM((64, 128), "f4"), plgpu.Barrier(), plgpu.ACC((64, 64))],
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=plgpu.InterpretParams(seed=1),
)
def body(
    x: plgpu.Ref, o: plgpu.Ref, tile: plgpu.Ref, loaded: plgpu.Ref, acc: plgpu.Ref
) -> None:
    plgpu.copy_gmem_to_smem(x.at[0:64], tile, loaded)
    plgpu.barrier_wait(loaded)

    @plgpu.loop(0, 8, init_carry=0)
    def total(i: jax.Array, carry: int) -> int:
        return carry + 1

    assert_type(total, int)

    @plgpu.when(plgpu.program_id(0) == 0)
    def _() -> None:
        o[0:8] = tile[0:8] + total
        plgpu.wgmma(acc, tile, tile.T)

    cast = plgpu.layout_cast(plgpu.load(tile), plgpu.Layout.WGMMA)
    assert_type(plgpu.run_scoped(lambda s: 3, plgpu.SMEM((8,), jnp.float32)), int)
    o[...] = cast

y = body(jnp.ones((64, 128)))
z = plgpu.ops.matmul(y, y)
print(plgpu.offline.compile(body, y, target="sm_90a")[0].ptx)
"""

# Each line is a mistake, with mypy's word for it and pyright's.
MISTAKES = """
import pallas_gpu as plgpu
plgpu.barrier_wait(3)  # arg-type, reportArgumentType
plgpu.kernel(print, out_typ=())  # call-arg, reportCallIssue
plgpu.CompilerParams(approx=True)  # call-arg, reportCallIssue
plgpu.masked_load  # attr-defined, reportAttributeAccessIssue
plgpu.Barrier(2)  # call-arg, reportCallIssue
plgpu.SMEM((8,), float, transform=())  # call-arg
"""


TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))
UNANNOTATED = ["sample_readme", *(f"sample_{p.stem}" for p in TUTORIALS)]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the samples."""
    folder = tmp_path_factory.mktemp("samples")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(
        r"^```python(?: offline)?\n(.*?)^```", readme, re.DOTALL | re.MULTILINE
    )
    (folder / "sample_readme.py").write_text("\n".join(blocks))
    for path in TUTORIALS:
        (folder / f"sample_{path.stem}.py").write_text(path.read_text(encoding="utf-8"))
    (folder / "annotated.py").write_text(ANNOTATED)
    (folder / "mistakes.py").write_text(MISTAKES)
    return folder


@pytest.fixture(scope="module")
def complaints(samples: Path) -> dict[str, list[str]]:
    """mypy's complaints about each sample, of one run over all."""
    pytest.importorskip("mypy")
    folder = samples
    (folder / "mypy.ini").write_text(CONFIG.format(samples=",".join(UNANNOTATED)))
    files = sorted(str(path) for path in folder.glob("*.py"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(folder / "mypy.ini"),
         "--cache-dir", str(folder / "cache"), *files],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, list[str]] = {Path(file).stem: [] for file in files}
    for line in done.stdout.splitlines():
        if (match := re.match(r"(.*?)\.py:(\d+): error: (.*)", line)) is not None:
            found.setdefault(Path(match[1]).stem, []).append(f"{match[2]}: {match[3]}")
    assert "Found " in done.stdout, done.stdout + done.stderr
    return found


@pytest.mark.parametrize("sample", ["annotated", *UNANNOTATED])
def test_a_sample_has_the_types_that_the_package_declares(complaints, sample: str):
    assert complaints[sample] == []


def mistakes(checker: int) -> list[str]:
    """The lines of the mistakes that a checker finds, and its words for them."""
    words = [line.partition("# ")[2].split(", ") for line in MISTAKES.splitlines()]
    return [
        f"{number} {of_line[checker]}"
        for number, of_line in enumerate(words, 1)
        if of_line[checker:] not in ([], [""])
    ]


def test_mistakes_are_found(complaints):
    found = [re.sub(r": .*\[(.*)\]$", r" \1", text) for text in complaints["mistakes"]]
    assert list(dict.fromkeys(found)) == mistakes(0)


def test_pyright_agrees(samples: Path):
    pytest.importorskip("basedpyright")
    config = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)]}
    (samples / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson",
         "--pythonpath", sys.executable, "--project", str(samples)],
        cwd=samples, capture_output=True, text=True,
    )  # fmt: skip
    found = [
        (Path(d["file"]).stem, d["range"]["start"]["line"] + 1, d["rule"])
        for d in json.loads(done.stdout)["generalDiagnostics"]
        if d["severity"] == "error"
    ]
    assert [f"{line} {rule}" for stem, line, rule in found if stem == "mistakes"] == (
        mistakes(1)
    )
    assert [d for d in found if d[0] != "mistakes"] == []


def test_the_package_is_marked_as_typed():
    assert (ROOT / "pallas_gpu" / "py.typed").exists()
