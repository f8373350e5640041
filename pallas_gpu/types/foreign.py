# SPDX-License-Identifier: Apache-2.0
"""Objects of JAX's own Pallas that are passed where those of this package are meant.

Both have the same names, so a program that mixes their imports looks right.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_gpu import _jax, errors
from pallas_gpu.types.elsewhere import INSTEAD

# The names that `import pallas_gpu` offers; the package enters them, being above this.
PUBLIC_NAMES: set[str] = set()

# Classes there whose counterpart here has another name; others have the same.
_OURS = {
    "GPUMemoryRef": "SMEM",
    "MemoryRef": "SMEM",
    "GPUMemorySpace": "SMEM",
    "WGMMAAccumulatorRef": "ACC",
    "_WGMMAAccumulatorRef": "ACC",
    "ParameterizedLayout": "TiledLayout",
    "InterpretGPUParams": "InterpretParams",
    "TileTransform": "TilingTransform",
}


def is_foreign(x: Any) -> bool:
    """True for an object, or a class, of JAX's Pallas."""
    kind = x if isinstance(x, type) else type(x)
    package, *parts = str(kind.__module__).split(".")
    return package == "jax" and ("pallas" in parts or "mosaic" in parts)


def refuse_foreign(values: Any, what: str) -> None:
    """Raises ArgumentTypeError if a leaf of a pytree is an object of JAX's Pallas.

    Args:
      values: one or several arguments.
      what: the function and the argument, e.g. `"kernel: scratch_types"`.
    """
    for leaf in jax.tree.leaves(values, is_leaf=is_foreign):
        if is_foreign(leaf):
            kind = leaf if isinstance(leaf, type) else type(leaf)
            ours = _OURS.get(kind.__name__, kind.__name__)
            raise errors.ArgumentTypeError(
                f"{what}: an object of JAX's Pallas is passed",
                expected="an object of this package",
                got=f"{kind.__module__}.{kind.__name__}",
                hint=_use(ours),
                where=_jax.where_now(),
            )


def foreign_function(name: str) -> errors.ArgumentTypeError:
    """Returns the error for a call of a function of JAX's Pallas in a kernel."""
    return errors.ArgumentTypeError(
        f"{name} of JAX's Pallas is called in a kernel of this package",
        expected="the functions of this package, which know its references",
        got=f"{name} of jax.experimental.pallas",
        hint=_use(name),
    )


def _use(name: str) -> str:
    if name in PUBLIC_NAMES:
        return f"`import pallas_gpu as plgpu`, and use `plgpu.{name}`"
    known = INSTEAD.get(name)
    if known is not None:
        return f"this package has no {name}: {known}"
    return f"this package has no {name}; docs/coverage.md lists what it has"
