# SPDX-License-Identifier: Apache-2.0
"""Writes docs/layouts.md and the drawings in it: `make layout-drawings`."""

from __future__ import annotations

import textwrap

import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu.layouts import Drawing
from tools.source_tree import ROOT

_WIDTH = 88
PATH = ROOT / "docs" / "layouts.md"
FOLDER = ROOT / "docs" / "layouts"
_HEAD = """\
# Drawings of layouts

Written by `make layout-drawings`: a test compares this page with the package.

Every layout draws itself: `layout.draw(shape)`. The result prints as text, a notebook
shows it as SVG, and `.svg` is the SVG to write to a file. Of a large array
`part=(slice(0, 16), slice(0, 8))` chooses what is drawn, at most 128 rows of 64
elements. `plgpu.print_layout("{}", x)` in a kernel prints which layout a value has, and
`PALLAS_GPU_KEEP=layouts` lists those of all values ([settings.md](settings.md)).
"""

# Title, text, name of the file, and the code that makes the drawing.
_SECTIONS = [
    (
        "Registers",
        "A cell has the warp and the lane of the thread, and below its register and "
        "the position in it. Elements of one thread have one colour, and no line "
        "between them: each thread of `WGMMA` holds pairs of adjacent elements, in "
        "rows that are 8 apart. Each warp has 16 rows.",
        "wgmma",
        "plgpu.Layout.WGMMA.draw((64, 16), part=(slice(0, 20), slice(0, 16)))",
    ),
    (
        "Registers, strided",
        "`WG_STRIDED` deals out vectors of adjacent elements, row by row. This is the "
        "layout of untiled memory.",
        "strided",
        "layout = plgpu.Layout.WG_STRIDED((4, 256), vec_size=4)\n"
        "layout.draw(part=(slice(0, 4), slice(0, 16)))",
    ),
    (
        "Registers, with copies",
        "The sum of the rows of a `WGMMA` array has the layout `WGMMA_ROW`: the four "
        "threads of a row have the same result. `+` marks elements of several "
        "threads, of which the first is drawn.",
        "row",
        "plgpu.Layout.WGMMA_ROW.draw((64,), part=slice(0, 32))",
    ),
    (
        "Shared memory",
        "A cell has the bank, and below the byte address. A warp that reads 16 bytes "
        "of each of eight rows at one column finds them in different banks: eight "
        "colours below each other. Without the swizzle they would all be in the same "
        "four banks.",
        "smem",
        "swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)\n"
        "tile = plgpu.SMEM((16, 64), jnp.float16, transforms=swizzled)\n"
        "tile.draw(part=(slice(0, 9), slice(0, 32)))",
    ),
    (
        "Tensor memory",
        "A cell has the lane, and below the column. The colour is that of the warp "
        "that reaches the lane. An accumulator of 64 rows uses 16 lanes of each warp "
        "for its left half and the other 16 for its right half.",
        "tmem",
        "layout = plgpu.layouts.TmemLayout.half_lane(32)\n"
        "layout.draw((64, 32), part=(slice(12, 20), slice(8, 24)))",
    ),
]
_TEXT = """\
## As text

```python
print(plgpu.Layout.WGMMA.draw((64, 8), part=(slice(7, 9), slice(0, 8))))
```

```text
{}
```
"""


def drawing(code: str) -> Drawing:
    """Returns the drawing that code on the page makes in its last line."""
    names = {"plgpu": plgpu, "jnp": jnp}
    *before, last = code.splitlines()
    exec("\n".join(before), names)
    result = eval(last, names)
    assert isinstance(result, Drawing)
    return result


def pictures() -> dict[str, str]:
    """Returns the SVG of each picture, by the name of its file."""
    return {f"{name}.svg": drawing(code).svg + "\n" for *_, name, code in _SECTIONS}


def page() -> str:
    """Returns the page."""
    parts = [_HEAD]
    for title, text, name, code in _SECTIONS:
        parts += [
            f"## {title}\n",
            f"{textwrap.fill(text, _WIDTH)}\n",
            f"```python\n{code}\n```\n",
            f"![{title}: {drawing(code).title}](layouts/{name}.svg)\n",
        ]
    shown = plgpu.Layout.WGMMA.draw((64, 8), part=(slice(7, 9), slice(0, 8)))
    return "\n".join([*parts, _TEXT.format(shown)])


def main() -> None:
    """Writes page and pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    PATH.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
