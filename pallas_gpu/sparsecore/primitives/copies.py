# SPDX-License-Identifier: Apache-2.0
"""Copies between memories: streams and DMAs, of parts and of rows that indices name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import errors, expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.sparsecore.primitives._define import define
from pallas_gpu.sparsecore.primitives.scoped import run_scoped
from pallas_gpu.sparsecore.primitives.sync import one_semaphore
from pallas_gpu.sparsecore.types import NamedRows, SemaphoreType

__all__ = ["AsyncCopyDescriptor", "async_copy", "make_async_copy", "sync_copy"]

_ACCESSES: Any = {"reads": ("src", "indices"), "writes": ("dst", "semaphore")}
copy_start_p = define(
    "copy_start", "copies", called="a copy", asynchronous=True, **_ACCESSES
)
copy_wait_p = define("copy_wait", "copies", called="a wait", **_ACCESSES)


@dataclasses.dataclass(frozen=True)
class AsyncCopyDescriptor:
    """A copy that is started and waited for: what `make_async_copy` returns.

    Attributes:
      src: what is copied: a reference or a part of one.
      dst: where it is copied to.
      sem: the DMA semaphore that counts it.
    """

    src: Any
    dst: Any
    sem: Any

    def start(self, priority: int = 0, *, add: bool = False) -> None:
        """Starts the copy; `add` adds to the destination instead.

        Raises:
          As `async_copy`.
        """
        operands, params = _described(self, "async_copy")
        _require_add(params["indexed"], add, self.dst)
        if priority not in (0, 1):
            raise errors.ArgumentError(
                "async_copy: the priority is out of range",
                expected="0 or 1",
                got=priority,
                hint="leave it out",
            )
        ops.bind(copy_start_p, operands, add=bool(add), priority=priority, **params)

    def wait(self) -> None:
        """Waits until as much has arrived as this copy moves, and subtracts it."""
        operands, params = _described(self, "wait")
        ops.bind(copy_wait_p, operands, **params)


@expect.arguments(src_ref=expect.anything, dst_ref=expect.anything, sem=expect.anything)
def make_async_copy(src_ref: Any, dst_ref: Any, sem: Any) -> AsyncCopyDescriptor:
    """Describes a copy, which `start` starts and `wait` waits for.

    Issued by: a subcore, which continues. The copy reads its source and writes its
    destination at any time until the wait returns.

    Args:
      src_ref, dst_ref, sem: as of `async_copy`.

    Raises:
      As `async_copy`.
    """
    descriptor = AsyncCopyDescriptor(src_ref, dst_ref, sem)
    _described(descriptor, "make_async_copy")
    return descriptor


@expect.arguments(src_ref=expect.anything, dst_ref=expect.anything, sem=expect.anything)
def async_copy(
    src_ref: Any, dst_ref: Any, sem: Any, *, priority: int = 0, add: bool = False
) -> AsyncCopyDescriptor:
    """Starts a copy and returns it; `.wait()` waits until it is complete.

    Between HBM or VMEM_SHARED and VMEM it is a stream, and rows may be named by
    indices; between other memories it is a DMA. Positions in HBM are multiples of 32
    bytes.

    Issued by: a subcore, which continues. The copy reads its source, its indices too,
    and writes its destination at any time until the wait returns.

    Args:
      src_ref: a reference, or a part of one: `ref.at[start:stop]`, or rows that
        indices name: `table_ref.at[indices]`.
      dst_ref: the same; at most one of them has indices.
      sem: a semaphore of type DMA; one per copy that is in flight at a time.
      priority: 0 or 1.
      add: whether rows are added to those at the destination; of f32 and i32, to VMEM
        or VMEM_SHARED.

    Returns:
      The copy.

    Raises:
      ArgumentTypeError: an operand is not a reference.
      ShapeError, DTypeError: source and destination differ; the indices are not int32.
      SemaphoreError: `sem` is not one semaphore of type DMA.
      UnsupportedError: indices on both sides; `add` without indices.

    Example:
      >>> plsc.async_copy(table_ref.at[rows_vmem], out_vmem, sem).wait()
    """
    copy = AsyncCopyDescriptor(src_ref, dst_ref, sem)
    copy.start(priority, add=add)
    return copy


@expect.arguments(src_ref=expect.anything, dst_ref=expect.anything)
def sync_copy(src_ref: Any, dst_ref: Any, *, add: bool = False) -> None:
    """Copies, and returns when the copy is complete.

    Issued by: a subcore, which waits. It allocates a semaphore of its own.

    Args:
      src_ref: as of `async_copy`, or a pytree of such.
      dst_ref: a pytree of the same structure.
      add: as of `async_copy`.

    Raises:
      As `async_copy`.

    Example:
      >>> plsc.sync_copy(x_ref.at[plsc.ds(base, 1024)], x_vmem)
    """
    sources, tree = jax.tree.flatten(src_ref, is_leaf=_is_ref)
    destinations, other = jax.tree.flatten(dst_ref, is_leaf=_is_ref)
    if tree != other:
        raise errors.ArgumentTypeError(
            "sync_copy: source and destination are different pytrees",
            expected=expect.shown(tree),
            got=expect.shown(other),
            hint="pass two references, or two pytrees of one structure",
        )
    if not sources:
        return

    def copied(sem: Any) -> None:
        pairs = zip(sources, destinations, strict=True)
        for copy in [async_copy(src, dst, sem, add=add) for src, dst in pairs]:
            copy.wait()

    run_scoped(copied, SemaphoreType.DMA(()))


def _is_ref(x: Any) -> bool:
    return types.base_aval(x) is not None


def _described(copy: AsyncCopyDescriptor, who: str) -> tuple[dict[str, Any], Any]:
    """Returns the operands and parameters of a copy, after checks."""
    indexed, indices = None, None
    sides: dict[str, Any] = {"src": copy.src, "dst": copy.dst}
    for name, ref in sides.items():
        ops.require_ref(ref, who, f"the {_LONG[name]}")
        steps = types.as_view(ref).transforms
        if not any(isinstance(step, NamedRows) for step in steps):
            continue
        if indexed is not None:
            raise errors.UnsupportedError(
                f"{who}: both sides have indices of rows",
                expected="indices on the side of HBM or VMEM_SHARED",
                got="indices of the source and of the destination",
                hint="gather to VMEM, and scatter from there",
            )
        indexed, (*window, indices) = name, steps
        if not isinstance(indices, NamedRows):
            raise errors.UnsupportedError(
                f"{who}: a part is selected of rows that indices name",
                expected="indices as the last step: ref.at[start:stop].at[indices]",
                got=types.describe(ref),
                hint="select the part first, or select a part of the indices",
            )
        sides[name] = types.RefView(types.as_view(ref).ref, tuple(window))
    ops.require_same(copy.src, copy.dst, who)
    semaphore = one_semaphore(copy.sem, SemaphoreType.DMA, who)
    rows = None if indices is None else indices.values
    ignored = None if indices is None else indices.ignored_value
    params = {"indexed": indexed, "ignored_value": ignored}
    return {**sides, "semaphore": semaphore, "indices": rows}, params


_LONG = {"src": "source", "dst": "destination"}


def _require_add(indexed: str | None, add: bool, dst: Any) -> None:
    if not add:
        return
    if indexed is None:
        raise errors.UnsupportedError(
            "a copy without indices of rows adds",
            expected="add=False, or rows that indices name",
            got="add=True",
            hint="copy to VMEM, and add there with plsc.addupdate; or name the rows: "
            "dst_ref.at[indices]",
        )
    if jnp.dtype(dst.dtype) not in (jnp.float32, jnp.int32):
        raise errors.DTypeError(
            "an adding copy of elements that streams cannot add",
            expected="float32 or int32",
            got=types.describe(dst),
            hint="convert the elements in VMEM first",
        )
