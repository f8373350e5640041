# SPDX-License-Identifier: Apache-2.0
"""What the blocks of a pipeline need: steps, buffers, and names for messages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu.pipeline.blocks import Stream
from pallas_gpu.pipeline.loops import unravel


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a pipeline, in row-major order of its grid."""

    sizes: Sequence[Any]
    count: Any
    slots: int

    @classmethod
    def of(cls, sizes: Sequence[Any], depth: int) -> Steps:
        count = math.prod(sizes)
        slots = min(depth, max(count, 1)) if isinstance(count, int) else depth
        return cls(sizes, count, slots)

    @property
    def once(self) -> bool:
        return isinstance(self.count, int) and self.count == 1

    @property
    def shared(self) -> Steps:
        """The one step of a block that all steps share."""
        return dataclasses.replace(self, count=1, slots=1)

    def indices(self, step: Any) -> tuple[Any, ...]:
        first = (jnp.int32(0),) * len(self.sizes)
        return first if self.once else unravel(step, self.sizes)


@dataclasses.dataclass(frozen=True)
class Named:
    """A declaration of scratch memory, with a name for messages."""

    declaration: Any
    name: str

    @classmethod
    def blocks(cls, stream: Stream, slots: int) -> Named:
        return cls(stream.buffers(slots), stream.name)

    @classmethod
    def barrier(cls, what: str, streams: Sequence[Stream], declaration: Any) -> Named:
        return cls(declaration, f"{what} of {', '.join(s.name for s in streams)}")


def declarations(memory: Any) -> Any:
    return jax.tree.map(lambda x: x.declaration, memory)


def names(memory: Any) -> list[str]:
    return [x.name for x in jax.tree.leaves(memory)]
