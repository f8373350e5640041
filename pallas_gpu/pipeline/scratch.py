# SPDX-License-Identifier: Apache-2.0
"""Scratch of a `pallas_call`: of the block, or of each of its warpgroups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_gpu.entry import kernel as kernel_lib
from pallas_gpu.entry.scoped import is_declaration, scoped


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Scratch as declared, with references in place of what has been allocated.

    Attributes:
      leaves: declarations and references.
      tree: structure of the body's last positional arguments and keyword arguments.
    """

    leaves: list[Any]
    tree: Any

    @classmethod
    def of(cls, declared: Any) -> Scratch:
        """Returns the scratch that an author has declared."""
        arguments = kernel_lib.scratch_of(declared)
        return cls(*jax.tree.flatten(arguments, is_leaf=is_declaration))

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those of the body, by position and by name."""
        return jax.tree.unflatten(self.tree, self.leaves)

    def allocate(
        self,
        f: Callable[[Scratch], None],
        names: Sequence[str],
        axes: Any,
        *,
        per_warpgroup: bool,
    ) -> None:
        """Calls `f` with the scratch, of which a part has been allocated.

        Args:
          f: the function.
          names: of all leaves, for messages.
          axes: the thread axis, if the warpgroups of a block share the part.
          per_warpgroup: whether to allocate what is in the registers of a warpgroup.
        """
        part = [
            i
            for i, x in enumerate(self.leaves)
            if is_declaration(x) and x.memory_space.per_warpgroup is per_warpgroup
        ]

        def with_refs(*refs: Any) -> None:
            leaves = list(self.leaves)
            for i, ref in zip(part, refs, strict=True):
                leaves[i] = ref
            f(dataclasses.replace(self, leaves=leaves))

        if part:
            declared, named = ([xs[i] for i in part] for xs in (self.leaves, names))
            scoped(with_refs, declared, {}, axes, named)
        else:
            f(self)
