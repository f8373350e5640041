# SPDX-License-Identifier: Apache-2.0
"""What is kept of the calls of a kernel: traces of its body, and compiled launches.

An eager call on a GPU whose arguments are like those of an earlier one only has to look
it up: JAX then dispatches the compiled launch as it does a jitted function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_gpu import _jax, types
from pallas_gpu.entry import call
from pallas_gpu.entry.caching import captured

# Of each kind, for different types of arguments: the oldest is dropped.
_MOST = 64


@dataclasses.dataclass(eq=False)
class Kept:
    """What is kept of a kernel's calls.

    Attributes:
      functions: those of the author that the body calls. What is kept is for the values
        that they captured.
      interpret: the kernel's parameter.
      traces: what `launch_body` has traced, by the types of the arguments.
      launches: compiled launches of eager calls.
    """

    functions: tuple[Callable[..., Any], ...]
    interpret: Any = None
    traces: dict[Any, Any] = dataclasses.field(default_factory=dict)
    launches: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def captured(self) -> tuple[Any, ...]:
        """Returns what the functions capture now."""
        return captured.captured(self.functions)

    def add_trace(self, key: Any, trace: Any) -> None:
        """Keeps a trace."""
        _add(self.traces, key, trace)

    def add_launch(
        self,
        args: Sequence[Any],
        params: call.CallParams,
        seen: tuple[Any, ...],
        out_tree: Any,
    ) -> None:
        """Keeps the launch of an eager call, if a later one can be like it.

        Args:
          args: of the call.
          params: of the kernel primitive, whose operands are the leaves of `args`.
          seen: what the functions capture.
          out_tree: the structure of the results.
        """
        leaves, tree = jax.tree.flatten(tuple(args))
        plain = params.devices is None and not params.enclosing
        if not plain or not _eager(leaves, params.interpret):
            return
        if call.platform_of(leaves) not in params.mesh.platforms:
            return
        launch = call.compiled(params)
        watched = captured.Watched(is_complete=False)
        _add(self.launches, _key(leaves, tree), (seen, watched, launch, out_tree))

    def launch(self, args: Sequence[Any]) -> Callable[[], Any] | None:
        """Returns the launch of an eager call like an earlier one, if there is one."""
        if not self.launches:
            return None
        leaves, tree = jax.tree.flatten(tuple(args))
        if not _eager(leaves, call.resolve_interpret(self.interpret)):
            return None
        key = _key(leaves, tree)
        found = self.launches.get(key)
        if found is None:
            return None
        seen, watched, launch, out_tree = found
        if not watched.holds():
            now = captured.Watched()
            if captured.captured(self.functions, now) != seen:
                return None
            self.launches[key] = seen, now, launch, out_tree
        return lambda: jax.tree.unflatten(
            out_tree, launch(*leaves)[: out_tree.num_leaves]
        )


def _eager(leaves: Sequence[Any], interpret: Any) -> bool:
    return (
        bool(leaves)
        and all(type(x) is _jax.ArrayImpl for x in leaves)
        and not isinstance(interpret, types.InterpretParams)
        and _jax.is_eager()
        and not _jax.splits_programs()
    )


def _key(leaves: Sequence[Any], tree: Any) -> Any:
    arrays = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
    return arrays, tree, _jax.trace_context(), _jax.enable_debug_checks.value


def _add(kept: dict[Any, Any], key: Any, value: Any) -> None:
    if len(kept) >= _MOST:
        kept.pop(next(iter(kept)))
    kept[key] = value
