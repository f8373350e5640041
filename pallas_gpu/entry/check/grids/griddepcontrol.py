# SPDX-License-Identifier: Apache-2.0
"""Kernels that are launched early: nothing of theirs reads GMEM before the wait."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_gpu import _jax, errors
from pallas_gpu.primitives.grids.griddepcontrol import wait_p
from pallas_gpu.program.walk import walk


def check_dependencies(jaxpr: _jax.Jaxpr, enclosing: Sequence[str]) -> None:
    """Raises UnsupportedError for a wait in a kernel that loads its own position.

    The launch passes a position on an axis around it, such as that of `jax.shard_map`,
    in GMEM. The kernel loads it when it starts, before it can wait.
    """
    if not enclosing:
        return
    for site in walk(jaxpr):
        if site.op.primitive is wait_p:
            raise errors.UnsupportedError(
                "griddepcontrol_wait in a kernel that asks for its position on an axis "
                "around the launch is not supported",
                expected="positions on the kernel's own axes",
                got=f"a position on {', '.join(map(repr, enclosing))}",
                hint="pass the position as an argument, and load it after the wait",
                where=site.where,
            )
