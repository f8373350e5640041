# SPDX-License-Identifier: Apache-2.0
"""JAX's reads and writes of references, over what each semantics does for them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from pallas_gpu import _jax
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext, unflatten_transforms
from pallas_gpu.lowering.rules import Decorator


def enter_rules(
    semantics: Callable[[Any], Decorator],
    *,
    read: Callable[[RuleContext, Any, Any, Any], Any],
    write: Callable[[RuleContext, Any, Any, Any], None],
    add: Callable[[Any, Any], Any],
    accumulators: ModuleType,
) -> None:
    """Enters the rules of get, swap and addupdate.

    Args:
      semantics: `lane` or `warpgroup`.
      read: `(ctx, handle, transforms, like) -> array`; `like` is a value that the
        array will meet, or None.
      write: `(ctx, handle, transforms, value)`.
      add: adds two values of one type.
      accumulators: has `read_accumulator` and `write_accumulator`.
    """

    def load(ctx: RuleContext, handle: Any, transforms: Any, like: Any) -> Any:
        if isinstance(handle, vals.AccumulatorHandle):
            return accumulators.read_accumulator(ctx, handle, transforms, 0)
        return read(ctx, handle, transforms, like)

    def store(ctx: RuleContext, handle: Any, transforms: Any, value: Any) -> None:
        if isinstance(handle, vals.AccumulatorHandle):
            accumulators.write_accumulator(ctx, handle, value)
        else:
            write(ctx, handle, transforms, value)

    @semantics(_jax.get_p)
    def _get(ctx: RuleContext, handle: Any, *leaves: Any) -> Any:
        transforms = unflatten_transforms(ctx.eqn.params["tree"], leaves)
        return load(ctx, handle, transforms, None)

    @semantics(_jax.swap_p)
    def _swap(ctx: RuleContext, handle: Any, value: Any, *leaves: Any) -> Any:
        transforms = unflatten_transforms(ctx.eqn.params["tree"], leaves)
        old = load(ctx, handle, transforms, value) if ctx.result_is_read else None
        store(ctx, handle, transforms, value)
        return old

    @semantics(_jax.addupdate_p)
    def _addupdate(ctx: RuleContext, handle: Any, value: Any, *leaves: Any) -> list:
        transforms = unflatten_transforms(ctx.eqn.params["tree"], leaves)
        old = load(ctx, handle, transforms, value)
        store(ctx, handle, transforms, add(old, value))
        return []
