# SPDX-License-Identifier: Apache-2.0
"""Writes docs/composition.md: how kernels compose with JAX. `make composition-table`.

Its rows are the programs of `tests/support/composition/`, which
`tests/test_composition_table.py` runs.
"""

from __future__ import annotations

import builtins
import sys
from typing import Any

from tools.source_tree import ROOT

PATH = ROOT / "docs" / "composition.md"
_HEAD = """\
# Kernels and JAX's transformations

Written by `make composition-table`. Each cell is a program in
`tests/support/composition/`, which the tests run in the emulator: it passes, or raises
what the notes say. `tests/test_gpu_composition.py` runs the main rows on a GPU.

*Eager* is a call of the program as it is written, *jit* one of `jax.jit` of it.
"""
_TEMPLATE = """\
## Templates for derivatives

A kernel has no derivative of its own: `jax.grad` of one is a `DifferentiationError`.
Its author writes the backward pass, as another kernel or in plain JAX, and connects the
two with `jax.custom_vjp`. What the backward pass needs is a residual, which the first
function of `defvjp` returns beside the result:

```python
import jax
import jax.numpy as jnp
import pallas_gpu as plgpu

like = jax.ShapeDtypeStruct((64, 128), jnp.float32)


@plgpu.kernel(out_type=like)
def silu_forward(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = x * jax.nn.sigmoid(x)


@plgpu.kernel(out_type=like)
def silu_backward(x_ref, g_ref, dx_ref):
    # Array code in a body has derivatives: the formula need not be written out.
    x, g = x_ref[...], g_ref[...]
    _, vjp = jax.vjp(lambda x: x * jax.nn.sigmoid(x), x)
    dx_ref[...] = vjp(g)[0]


silu = jax.custom_vjp(silu_forward)
silu.defvjp(
    lambda x: (silu_forward(x), x),  # the result, and what backward needs
    lambda x, g: (silu_backward(x, g),),  # one cotangent for each argument
)
```

In a `jax.shard_map` of which each device has its rows of `x` and the same weights `w`,
the derivative of `w` is a sum over the devices. JAX adds up if `w` is converted before
the function with the rule, `f(x, jax.lax.pcast(w, "d", to="varying"))`, and otherwise
says that the types of operand and derivative differ. `pallas_gpu.ops` converts.

`jax.custom_jvp` gives forward mode too. Its rule is differentiated for reverse mode, so
the tangent is plain JAX, linear in the tangents; a kernel in it would need a rule:

```python
silu = jax.custom_jvp(silu_forward)


@silu.defjvp
def silu_rule(primals, tangents):
    (x,), (t,) = primals, tangents
    s = jax.nn.sigmoid(x)
    return silu(x), (s + x * s * (1 - s)) * t
```

## Errors

An eager call raises the package's own classes, with the kernel's line and its text. So
do eager `vmap` and `grad`, and programs under `jax.disable_jit()`. Under `jit`, and in
`lax.scan` and its like, JAX's runtime raises `jax.errors.JaxRuntimeError`: its text is
the kernel's line and then the whole report, once, in at most 25 lines.
"""


def table() -> str:
    """Returns the page."""
    from tests.support.composition import CELLS, GROUPS

    notes: dict[str, int] = {}
    lines = [_HEAD]
    for group, rows in GROUPS.items():
        head = " | ".join(f"{str(way).replace(' ', ', `')}`" for way in CELLS)
        lines += [f"## {group}\n", f"| | {head} |", "|---" * (len(CELLS) + 1) + "|"]
        for row in rows:
            cells = []
            for way in CELLS:
                refused = row.outcome(way)
                if refused is None:
                    cells.append("yes")
                    continue
                note = f"{refused.reason}: {_shown(refused)}"
                cells.append(f"no [{notes.setdefault(note, len(notes) + 1)}]")
            lines.append(f"| {row.name} | {' | '.join(cells)} |")
        lines.append("")
    lines += ["Notes:\n", *(f"{i}. {note}" for note, i in notes.items()), ""]
    return "\n".join(lines) + "\n" + _TEMPLATE


def _shown(refused: Any) -> str:
    """Returns what users see: the class of an error, unless it is one of the tests."""
    import jax

    from pallas_gpu import errors

    name = refused.error.__name__
    public = (builtins, jax.errors, errors)
    if any(getattr(module, name, None) is refused.error for module in public):
        return f'`{name}`, "{refused.text}"'
    return refused.text


def main() -> int:
    PATH.write_text(table(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
