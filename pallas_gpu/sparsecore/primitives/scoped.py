# SPDX-License-Identifier: Apache-2.0
"""`run_scoped`: scratch memory within a part of a kernel; `get_global`, of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_gpu import _jax, errors, expect
from pallas_gpu.entry import scope
from pallas_gpu.entry.scoped import called, is_declaration
from pallas_gpu.primitives.scoped import get_global_p
from pallas_gpu.sparsecore.types import Scratch, Semaphore, SemaphoreType

__all__ = ["get_global", "run_scoped"]


@expect.arguments()
def run_scoped[T](f: Callable[..., T], *types: Any, **kw_types: Any) -> T:
    """Calls `f` with fresh scratch references.

    Issued by: a subcore. VMEM, SMEM and semaphores are its own; all subcores of a core
    have one VMEM_SHARED, whichever enters first. The contents are undefined at first;
    semaphores are zero, and have to be zero at the end.

    Args:
      f: function of one reference per declaration.
      *types: declarations: `VMEM(...)`, `SemaphoreType.DMA`, or pytrees of them.
      **kw_types: the same, passed by name.

    Returns:
      The result of `f`: values, not references.

    Raises:
      ArgumentTypeError: an argument is not a declaration.
      MemorySpaceError: memory that the subcore does not have.

    Example:
      >>> plsc.run_scoped(lambda x_vmem: ..., plsc.VMEM((1024,), jnp.float32))
    """
    for leaf in jax.tree.leaves((types, kw_types), is_leaf=is_declaration):
        require_declaration(leaf)
    return called(f, (), types, kw_types)


@expect.arguments()
def get_global(what: Any) -> Any:
    """Returns scratch memory, or semaphores, of the whole kernel.

    Each call in the source has its own, as if `what` were in `scratch_types`.

    Issued by: a subcore.

    Raises:
      As `run_scoped`.
    """
    scope.current_mesh("get_global")
    require_declaration(what)
    with _jax.trace_without_ref_rules():
        (ref,) = get_global_p.bind(what=what.to_ref())
    return ref


def require_declaration(leaf: Any) -> None:
    """Raises ArgumentTypeError unless a kernel for SparseCores can allocate it."""
    if not isinstance(leaf, Scratch | Semaphore | SemaphoreType):
        raise errors.ArgumentTypeError(
            "not a scratch declaration of SparseCores",
            expected="plsc.VMEM(shape, dtype), plsc.SemaphoreType.DMA, or pytrees of "
            "them",
            got=expect.shown(leaf),
            hint="declare an array with plsc.VMEM(shape, dtype)",
        )
