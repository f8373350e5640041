# SPDX-License-Identifier: Apache-2.0
"""Draws the measured pictures of tutorials/06_profiler and docs/profiler.md, on a GPU.

python -m benchmarks.tutorial_profile FOLDER

writes the pictures to the folder, and prints the texts that belong to them.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Iterator
from pathlib import Path

import jax

import pallas_gpu as plgpu
from benchmarks import profiler, timing, tutorial_matmul

NOTEBOOK = Path(__file__).resolve().parents[1] / "tutorials" / "06_profiler.py"


def pictures() -> Iterator[tuple[str, str, str]]:
    """Yields name, SVG and text of each picture."""
    names = runpy.run_path(str(NOTEBOOK), run_name="notebook")
    random, product = names["random"], names["product_of"]
    a, b = random(1024, 4096, 0), random(4096, 1024, 1)
    profiled = plgpu.testing.profile(product)
    end = 0.0
    for name, ahead in (("late", 1), ("early", names["STAGES"])):
        profiled(a, b, ahead=ahead)  # compiles
        found = profiled(a, b, ahead=ahead)
        # Both pictures have the same scale.
        end = end or found.traces["end"].max() / 4
        picture = found.svg(between=(0, end), width=960)
        yield f"06_profiler_{name}", picture, str(found)
    roles = plgpu.testing.profile(profiler.product())
    keys = jax.random.split(jax.random.key(0))
    a, b = (tutorial_matmul.normal(key) for key in keys)
    roles(a, b)
    found = roles(a, b)
    yield "profiler", found.svg(between=(0, 12e3), width=960), str(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print(timing.environment())
    for name, picture, text in pictures():
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")
        print(f"{name}.svg\n{text}\n")


if __name__ == "__main__":
    main()
