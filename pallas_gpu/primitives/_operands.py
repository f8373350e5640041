# SPDX-License-Identifier: Apache-2.0
"""Operands of our primitives, as one pytree that is flattened here.

A reference operand is the reference and the steps that JAX recorded on it; an absent
operand is None. Rules restore the tree with their own values at the leaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.layouts.window import Window
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.types import values
from pallas_gpu.types.steps import split_cluster


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class RefOperand:
    """A reference with the steps applied to it that select a window.

    Attributes:
      ref: the reference: a tracer, an abstract value, or a rule's own handle.
      transforms: steps as recorded by JAX, with values at their leaves.
      owner: the step that says whose memory it is; None: the executing device's.
    """

    ref: Any
    transforms: tuple[Any, ...] = ()
    owner: types.Owner | None = None

    @classmethod
    def of(cls, ref: Any, steps: Sequence[Any]) -> RefOperand:
        """Returns a reference with steps, of which one may name its owner."""
        return cls(ref, *types.split_owner(steps))

    def tree_flatten(self):
        return (self.ref, self.transforms, self.owner), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    @property
    def whole(self) -> Any:
        """All of the reference, in its owner's memory."""
        return types.RefView(self.ref, (self.owner,)) if self.owner else self.ref

    def window(self, shape: Sequence[int]) -> Window:
        """Returns the part of the reference that the steps select."""
        return types.resolve(shape, self.transforms)

    @property
    def viewed(self) -> tuple[tuple[int, ...], Any] | None:
        """Shape and dtype as which copies see the reference; None for its own."""
        step = types.reinterpreted(self.transforms)
        return None if step is None else (step.shape, step.dtype)

    @property
    def dtype(self) -> Any:
        """Type of the elements; `ref` is an abstract value."""
        step = types.reinterpreted(self.transforms)
        return self.ref.dtype if step is None or step.dtype is None else step.dtype

    def array_type(self) -> jax.core.ShapedArray:
        """Returns the type of the part as an array; `ref` is an abstract value."""
        return jax.core.ShapedArray(self.window(self.ref.shape).shape, self.dtype)


def operand(ref: Any) -> RefOperand:
    """Splits a reference, transformed or not, into reference and steps."""
    steps: tuple[Any, ...] = ()
    while isinstance(ref, _jax.TransformedRef):
        if ref.multiref:
            raise errors.UnsupportedError(
                "a choice among references is not supported",
                expected="one reference",
                got=f"{len(ref.ref)} references",
                hint="use plgpu.when",
            )
        steps = (*ref.transforms, *steps)
        ref = ref.ref
    _refuse_other_cta(steps)
    return RefOperand.of(ref, steps)


def split_cta(ref: Any) -> tuple[types.RefView, tuple[str, ...], Any]:
    """Returns a reference in this CTA, and the axes and the position of the other one.

    The position is None for a reference that is not a result of `cluster_ref`.
    """
    view = types.as_view(ref.at[()])
    steps, other = split_cluster(view.transforms)
    own = types.RefView(view.ref, steps)
    if other is None:
        return own, (), None
    at = (np.int32(x) if isinstance(x, int) else x for x in other.positions)
    return own, other.axes, tuple(at)


def _split(value: Any) -> Any:
    known = isinstance(value, RefOperand) or types.base_aval(value) is None
    return value if known else operand(value)


def _refuse_other_cta(steps: Sequence[Any]) -> None:
    if not any(isinstance(step, types.ClusterStep) for step in steps):
        return
    raise errors.UnsupportedError(
        "an operand is in the SMEM of another CTA",
        expected="a reference to memory of this CTA",
        got="a result of cluster_ref",
        hint="reads, writes, atomic operations, barrier_arrive and async_store_smem "
        "reach other CTAs; copies do with collective_axes",
    )


def bind(primitive: Any, operands: Any, **params: Any) -> Any:
    """Binds a primitive to a pytree of operands."""
    if isinstance(operands, dict):
        operands = {name: _split(value) for name, value in operands.items()}
    for named in operands if isinstance(operands, list) else [operands]:
        _check_accesses(primitive, named)
    leaves, tree = jax.tree.flatten(operands)
    return primitive.bind(*leaves, tree=tree, **params)


def _check_accesses(primitive: Any, operands: Any) -> None:
    """Raises unless `define` declares how each reference is accessed."""
    operation = registry.operation(primitive)
    names = set(operands) if isinstance(operands, dict) else set()
    refs = {name for name in names if isinstance(operands[name], RefOperand)}
    if operation is None or not set(operation.accesses) <= names:
        raise errors.InternalError(
            f"{primitive.name} accesses operands that it does not have",
            expected=f"some of {sorted(names)}",
            got=None if operation is None else operation.accesses,
        )
    if not refs <= set(operation.accesses):
        raise errors.InternalError(
            f"{primitive.name} has references that it neither reads nor writes",
            expected=f"{sorted(refs)} in `reads` or `writes`",
            got=operation.accesses,
        )


def unflatten(tree: Any, leaves: Sequence[Any]) -> Any:
    """Returns the pytree of operands with the given leaves."""
    return jax.tree.unflatten(tree, leaves)


# --- checks that many public functions share -----------------------------------------


def require_ref(ref: Any, who: str, what: str) -> Any:
    """Returns the reference's abstract value, or raises for anything else."""
    aval = types.base_aval(ref)
    if aval is None:
        raise errors.ArgumentTypeError(
            f"{who}: {what} is not a reference",
            expected="a reference (an argument or scratch of the kernel)",
            got=expect.shown(ref),
            hint="pass the reference itself, or a part of it with .at[...]",
        )
    return aval


def require_space(ref: Any, space: types.MemorySpace, who: str, what: str) -> None:
    """Raises unless the reference is in the memory space."""
    aval = require_ref(ref, who, what)
    if aval.memory_space is not space:
        raise errors.MemorySpaceError(
            f"{who}: {what} is in the wrong memory space",
            expected=f"a reference in {space.name}",
            got=types.describe(ref),
            hint=f"{_brought_to(space, aval.memory_space)}, or swap the operands",
        )


def _brought_to(space: types.MemorySpace, given: types.MemorySpace) -> str:
    """Returns what makes an operand one in the memory space."""
    if space is types.SMEM and given is types.GMEM:
        return (
            "copy it to SMEM: in a pallas_call by plgpu.BlockSpec(memory_space="
            "plgpu.SMEM), or by a block shape; in a kernel by plgpu.copy_gmem_to_smem "
            "to a plgpu.SMEM(shape, dtype)"
        )
    return str(space.declared_by)


def require_same(src: Any, dst: Any, who: str) -> None:
    """Raises unless two references have the same shape and dtype."""
    if tuple(src.shape) != tuple(dst.shape):
        raise errors.ShapeError(
            f"{who}: source and destination have different shapes",
            expected=f"{types.describe(dst)} (the destination)",
            got=f"{types.describe(src)} (the source)",
            hint="slice the larger one with .at[...]",
        )
    if jnp.dtype(src.dtype) != jnp.dtype(dst.dtype):
        raise errors.DTypeError(
            f"{who}: source and destination have different element types",
            expected=f"{types.describe(dst)} (the destination)",
            got=f"{types.describe(src)} (the source)",
            hint="a copy cannot convert: load, astype and store instead",
        )


def one_barrier(barrier: Any, who: str) -> RefOperand:
    """Returns the operand of a barrier, or of an array of one."""
    aval = require_ref(barrier, who, "the barrier")
    if aval.memory_space is not types.BARRIERS:
        raise errors.MemorySpaceError(
            f"{who}: the barrier is not a barrier",
            expected="a reference declared with plgpu.Barrier()",
            got=types.describe(barrier),
            hint="declare it in scratch_types (pallas_call: scratch_shapes) or "
            "run_scoped",
        )
    return _without_reshapes(only_element(barrier, "barrier", who))


def only_element(ref: Any, kind: str, who: str) -> RefOperand:
    """Returns the operand of the element of an array of one, or raises ShapeError."""
    if math.prod(ref.shape) != 1:
        raise errors.ShapeError(
            f"{who}: the operand is an array of {kind}s",
            expected=f"one {kind}",
            got=f"{kind}s of shape {tuple(ref.shape)}",
            hint=f"select one with {kind}.at[i]",
        )
    return operand(ref.at[(0,) * len(ref.shape)])


def _without_reshapes(one: RefOperand) -> RefOperand:
    """Returns one element of a reference by the indices of the reference itself."""
    if not any(isinstance(step, _jax.ReshapeTransform) for step in one.transforms):
        return one
    aval = types.base_aval(one.ref)
    steps = one.transforms
    found = types.select(aval.shape, aval.dtype, steps, row_major=False, masked=False)
    return operand(types.RefView(one.ref, found.window).at[found.indices])


def require_scalar_bool(predicate: Any, who: str) -> Any:
    """Returns the predicate as a scalar bool, or raises."""
    aval = values.abstract(predicate)
    if not isinstance(aval, _jax.ShapedArray) or aval.shape or aval.dtype != jnp.bool_:
        plain = isinstance(aval, _jax.ShapedArray)
        raise errors.ShapeError(
            f"{who}: the predicate is not a scalar bool",
            expected="a scalar bool",
            got=f"{aval.dtype}{list(aval.shape)}" if plain else expect.shown(predicate),
            hint="compare scalars: lax.axis_index(name) == 0, ref[i] > 0",
        )
    return jnp.asarray(predicate)


def _predicate(value: Any, what: str) -> Any:
    who = what.partition(":")[0]
    return None if value is None else require_scalar_bool(value, who)


# An annotation of a parameter, with its rule.
Predicate = Annotated[bool | jax.Array | None, _predicate]


def require_inside(window: Window, who: str) -> None:
    """Raises OutOfBoundsError for a part that is known to exceed its reference."""
    for axis in window.over_the_edge()[:1]:
        start, size, n = (
            window.starts[axis],
            window.sizes[axis],
            window.array_shape[axis],
        )
        expected, got = f"a range within 0 to {n}", f"a range of {size}"
        if axis not in window.axes:
            expected, got = f"0 to {n - 1}", f"index {start}"
        elif isinstance(start, int):
            got = f"{start} to {start + size}"
        raise errors.OutOfBoundsError(
            f"{who} outside the reference",
            expected=f"{expected} in dimension {axis} of shape {window.array_shape}",
            got=got,
            hint="check the index, or the declared shape of the reference",
        )
