# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels, and the references of a block by their names."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pallas_gpu as plgpu


class Memory(types.SimpleNamespace):
    """Inputs, results and scratch of a block: attributes with the names declared."""

    def get(self, name: str) -> Any:
        return vars(self).get(name)

    def but(self, **changes: Any) -> Memory:
        return Memory(**{**vars(self), **changes})


def launch(
    p: Any,
    name: str,
    body: Callable[[Memory], None],
    inputs: Iterable[str],
    results: Any,
    scratch: Mapping[str, Any],
    *,
    grid: Mapping[str, int],
    warpgroups: int,
    cluster: Mapping[str, int] | None = None,
) -> Callable[..., Any]:
    """Returns a kernel: a function of arrays, in order.

    Args:
      p: the problem, with `compiler_params` and `interpret`.
      body: takes the references of inputs, results and scratch.
      inputs: names of the arrays.
      results: their types by names; or that of one, `out`.
      grid, cluster: sizes of the axes.
    """
    several = isinstance(results, Mapping)
    names = (*inputs, *(results if several else ("out",)))
    sizes = cluster or {}

    def with_names(*refs: Any, **scratch: Any) -> None:
        body(Memory(**dict(zip(names, refs, strict=True)), **scratch))

    return plgpu.kernel(
        with_names,
        out_type=tuple(results.values()) if several else results,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple(sizes.values()),
        cluster_names=tuple(sizes),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name=name,
        scratch_types=scratch,
        compiler_params=p.compiler_params,
        interpret=p.interpret,
    )
