# SPDX-License-Identifier: Apache-2.0
"""The state of a kernel while its operations are lowered, and what rules get."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.arch import tpu
from pallas_gpu.entry.call import CallParams
from pallas_gpu.layouts.window import Sum
from pallas_gpu.lowering import rules
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import Starts
from pallas_gpu.program.nodes import Access, Op
from pallas_gpu.sparsecore.emitters import conversions, elementwise
from pallas_gpu.sparsecore.emitters.memory import Part
from pallas_gpu.sparsecore.emitters.module import Module
from pallas_gpu.sparsecore.emitters.values import (
    I32,
    Array,
    ArrayType,
    constant,
    i32,
    known,
    scalar_type,
)
from pallas_gpu.sparsecore.types import MACHINE

_add = elementwise.ROWS["add"]["i"]


@dataclasses.dataclass
class SparseCoreState:
    """The state of a kernel while it is lowered.

    Attributes:
      params: parameters of the call.
      target: the chip.
      module: the open module.
      plan: the memory that the module's function has as arguments.
      where: returns the line of the operation that is lowered.
      path: the operations around it.
    """

    params: CallParams
    target: tpu.TpuTarget
    module: Module
    plan: Any
    where: Callable[[], str | None] = lambda: None
    path: tuple[Any, ...] = ()

    keeps_lines = False

    @functools.cached_property
    def starts(self) -> Starts:
        """What is known of the parts that the body accesses."""
        return Starts(region_of(self.params.jaxpr), self.params.mesh.axes)

    @property
    def rules(self) -> Mapping[Any, Callable[..., Any]]:
        """The rule of each primitive."""
        return registry.rules(registry.RuleKind.EMIT, MACHINE)

    @property
    def is_vector(self) -> bool:
        """Whether vector subcores run the kernel."""
        mesh: Any = self.params.mesh
        return mesh.is_vector

    def position(self, name: Any) -> Array:
        """Returns the subcore's position on an axis."""
        names = [axis for axis, _ in self.params.mesh.axes]
        return Array((), I32, (self.module.positions[names.index(name)],))

    def finished(self, ctx: Any, results: Sequence[Any]) -> Sequence[Any]:
        """Returns the results of a rule."""
        return results

    def constant(self, value: Any, dtype: Any) -> Array:
        """Returns a scalar that is known in advance."""
        dtype = np.dtype(dtype)
        return Array((), dtype, (constant(value, scalar_type(dtype)),))

    def part(self, access: Access, read: Callable[[Any], Any]) -> Part:
        """Returns a part of a reference, an operand of a rule."""
        if access.viewed is not None:
            raise errors.UnsupportedError(
                "a reference that is viewed as another shape or type",
                expected="references as declared, and slices of them",
                got=f"a view as {access.viewed}",
                hint="declare the array in that shape, or bitcast what is loaded",
            )

        def start(x: Any) -> Any:
            if isinstance(x, int):
                return x
            terms = x.terms if isinstance(x, Sum) else (x,)
            total: Any = x.constant if isinstance(x, Sum) else 0
            for term in terms:
                total = _plus(total, read(term).value)
            return total

        starts = [start(x) for x in access.window.starts]
        window = access.window.at(starts, [x.divisor for x in self.starts.of(access)])
        return Part(read(access.buffer), window)

    def no_rule(self, op: Op) -> errors.PallasGpuError:
        """Returns the error for a primitive without a rule."""
        return errors.UnsupportedError(
            f"{op.name} is not supported on SparseCores",
            hint="see docs/sparsecore.md for what is supported",
            where=op.where,
        )


# Registers the rule which emits a primitive.
emits = functools.partial(rules.emits, machine=MACHINE)


def array_type(aval: Any, params: CallParams) -> ArrayType:
    """Returns what a reference is declared as in a kernel."""
    options: Any = params.compiler_params
    own = aval.tiling if aval.tiling != options.tiling else None
    space = aval.memory_space.name.lower()
    return ArrayType(tuple(aval.shape), np.dtype(aval.dtype), space, own)


def masks(ctx: Any, mask: Array | None, count: int, elements: int) -> list[Any]:
    """Returns the mask of each of several registers; None for each without one."""
    if mask is None:
        return [None] * count
    return list(conversions.mask_of(mask, elements, ctx.kernel.target.lanes).parts)


def _plus(a: Any, b: Any) -> Any:
    """Adds two starts; constants stay numbers."""
    left, right = known(a), known(b)
    if left is not None and right is not None:
        return left + right
    if left == 0:
        return b
    if right == 0:
        return a
    return _add(i32(a), i32(b))
