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
    """Declarations of scratch references.

    Attributes:
      positional: of the body's last positional arguments.
      named: of its keyword arguments.
    """

    positional: tuple[Any, ...]
    named: dict[str, Any]

    @classmethod
    def of(cls, declared: Any) -> Scratch:
        """Returns the scratch that an author has declared."""
        return cls(*kernel_lib.scratch_of(declared))

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self._leaves()

    def _leaves(self) -> list[Any]:
        return jax.tree.leaves((self.positional, self.named), is_leaf=is_declaration)

    def shared(self, f: Callable[..., Any], names: Sequence[str], axis: str) -> None:
        """Calls `f` in all warpgroups with the references that they share."""
        self._within(f, names, axis, per_warpgroup=False)

    def own(self, f: Callable[..., Any], names: Sequence[str]) -> None:
        """Calls `f` in one warpgroup with the references in its registers."""
        self._within(f, names, (), per_warpgroup=True)

    def _within(
        self,
        f: Callable[..., Any],
        names: Sequence[str],
        axes: Any,
        per_warpgroup: bool,
    ) -> None:
        leaves = zip(self._leaves(), names, strict=True)
        wanted = [
            (x, name)
            for x, name in leaves
            if x.memory_space.per_warpgroup is per_warpgroup
        ]
        if not wanted:
            f()
            return
        scoped(f, [x for x, _ in wanted], {}, axes, [name for _, name in wanted])

    def arguments(
        self, shared: Sequence[Any], own: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the references as the body gets them."""
        rest = {True: iter(own), False: iter(shared)}
        leaves, tree = jax.tree.flatten(
            (self.positional, self.named), is_leaf=is_declaration
        )
        refs = [next(rest[x.memory_space.per_warpgroup]) for x in leaves]
        return jax.tree.unflatten(tree, refs)
