# SPDX-License-Identifier: Apache-2.0
"""`run_state`: references with initial and final values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_gpu import errors, expect, types
from pallas_gpu.entry import scope as scopes
from pallas_gpu.entry.scoped import run_scoped
from pallas_gpu.primitives.tensor_cores.wgmma import wgmma_accumulator_load
from pallas_gpu.types import values


@expect.arguments()
def run_state(f: Callable[..., None]) -> Callable[..., Any]:
    """Turns a function over references into a function over values.

    PTX: none. Since: sm_90a.

    In a kernel the references are accumulators. Issued by a warpgroup. The result is
    read after all `wgmma` of the warpgroup.

    Outside a kernel they are those of `jax.new_ref`: `f` calls kernels that update them
    in place.

    Args:
      f: function of a pytree of references that returns None, or an empty pytree as a
        kernel without results does.

    Returns:
      A function of the same pytree with `plgpu.ACC.init(array)` at its leaves, or
      declarations `plgpu.ACC(...)`, which are initialized with zeros, that returns the
      final values. Outside a kernel the leaves are arrays.

    Raises:
      ArgumentTypeError: a leaf is not an accumulator, or not an array.
      KernelError: `f` returns a value.

    Example:
      >>> total = plgpu.run_state(lambda acc: plgpu.wgmma(acc, a, b))(
      ...     plgpu.ACC.init(jnp.zeros((64, 128), jnp.float32)))
    """

    def run(init: Any) -> Any:
        leaves, tree = jax.tree.flatten(init, is_leaf=_is_leaf)
        if not scopes.in_kernel() and not any(map(_is_leaf, leaves)):
            return _of_arrays(f, init)
        for leaf in leaves:
            _require_accumulator(leaf)
        declarations = [getattr(leaf, "declaration", leaf) for leaf in leaves]

        def scope(*refs: Any) -> Any:
            for ref, leaf in zip(refs, leaves, strict=True):
                if isinstance(leaf, types.AccumulatorInit):
                    ref[...] = leaf.value
            _call(f, jax.tree.unflatten(tree, refs))
            return [wgmma_accumulator_load(ref) for ref in refs]

        return jax.tree.unflatten(tree, run_scoped(scope, *declarations))

    return run


def _of_arrays(f: Callable[..., None], init: Any) -> Any:
    arrays = jax.tree.map(lambda x: values.array(x, "run_state: a leaf"), init)
    refs = jax.tree.map(jax.new_ref, arrays)
    _call(f, refs)
    return jax.tree.map(jax.freeze, refs)


def _call(f: Callable[..., None], state: Any) -> None:
    result = scopes.call("run_state", f, state)
    # A kernel without results returns an empty pytree.
    if jax.tree.leaves(result):
        hint = "store results to the references: run_state returns their contents"
        scopes.require_none("run_state", f, result, hint)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, (types.ACC, types.AccumulatorInit))


def _require_accumulator(leaf: Any) -> None:
    if not _is_leaf(leaf):
        raise errors.ArgumentTypeError(
            "run_state: a leaf is not an accumulator",
            expected="plgpu.ACC.init(array), or plgpu.ACC(shape, dtype)",
            got=expect.shown(leaf),
            hint="carry plain values through lax.fori_loop instead",
        )
