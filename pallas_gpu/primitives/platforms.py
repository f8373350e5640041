# SPDX-License-Identifier: Apache-2.0
"""Code of JAX that differs by platform: in a kernel, that for CUDA."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_gpu import _jax, errors, types
from pallas_gpu.primitives import _registry as registry

_OURS = ("cuda", "gpu")


def chosen(platforms: Sequence[Sequence[str] | None]) -> int | None:
    """Returns the index of the code for CUDA; None if there is none.

    Args:
      platforms: for each code the names of its platforms, None for the default.
    """
    for i, names in enumerate(platforms):
        if names is None or any(name in _OURS for name in names):
            return i
    return None


@registry.checks(_jax.primitive_by_name("platform_index"))
def _check(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    platforms = eqn.params["platforms"]
    if chosen(platforms) is None:
        raise errors.UnsupportedError(
            "platform_dependent has no code for CUDA, and no default",
            expected="cuda= or default=",
            got=", ".join(name for names in platforms for name in names),
            hint="pass default=",
        )
