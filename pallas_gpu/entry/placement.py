# SPDX-License-Identifier: Apache-2.0
"""Operands and meshes of devices that a kernel cannot be launched with.

Operands that are sharded over devices outside `jax.shard_map` are an error.

Every device launches a kernel on whole operands: XLA would gather them first, without
a word. Shardings are known in eager calls and for meshes whose axes are explicit; under
`jax.jit` with automatic axes XLA's partitioner says what it has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning

from pallas_gpu import _jax, errors
from pallas_gpu.entry import scope


def require_whole(
    name: str, shardings: Sequence[Any], where: Callable[[], str | None]
) -> None:
    """Refuses operands of which a device has a part alone; `where` is the call's line.

    Raises:
      UnsupportedError: an operand is sharded.
    """
    for i, sharding in enumerate(shardings):
        if sharding is not None and not sharding.is_fully_replicated:
            raise errors.UnsupportedError(
                f"kernel {name}: operand {i} is sharded over devices",
                expected="operands of which each device has the whole",
                got=getattr(sharding, "spec", sharding),
                hint="call it in jax.shard_map, in which each device launches the "
                "kernel on its own part",
                where=where(),
            )


def require_whole_arrays(name: str, arrays: Sequence[Any]) -> None:
    """Refuses sharded arrays of an eager call."""
    found = [x.sharding if isinstance(x, jax.Array) else None for x in arrays]
    require_whole(name, found, scope.called_at)


def require_whole_types(name: str, avals: Sequence[Any]) -> None:
    """Refuses operands whose types say that they are sharded over explicit axes."""
    for aval in avals:
        if any(part is not None for part in aval.sharding.spec):
            found = [aval.sharding for aval in avals]
            require_whole(name, found, scope.called_at)


def require_order(
    name: str, devices: Iterable[Any], where: Callable[[], str | None]
) -> None:
    """Refuses a mesh that does not have all devices in row-major order.

    Of several processes, which may be refused later, ids have gaps.

    Raises:
      UnsupportedError: the ids of its devices are not 0, 1, 2 …
    """
    devices = tuple(devices)
    ids = tuple(device.id for device in devices)
    several = len({getattr(device, "process_index", 0) for device in devices}) > 1
    if ids != tuple(sorted(ids) if several else range(len(ids))):
        raise errors.UnsupportedError(
            f"kernel {name}: the mesh does not have all devices in row-major order",
            expected=f"devices 0 to {len(ids) - 1}, the last axis varying fastest",
            got=f"devices {ids}",
            hint="jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), names)",
            where=where(),
        )


def checked(rule: Any) -> Any:
    """Returns a lowering rule of the kernel primitive that refuses sharded operands.

    And meshes whose positions are not the ids of all devices, where a kernel accesses
    the memory of others.
    """

    def with_check(ctx: Any, *args: Any, **params: Any) -> Any:
        mesh = _jax.mesh_of_lowering(ctx)
        if params["devices"] is not None and mesh is not None:
            require_order(params["name"], mesh.devices.flat, scope.called_at)
        if args and _jax.is_partitioned(ctx) and not _jax.is_export(ctx):
            where, name = scope.called_at(), params["name"]
            args = _jax.mlir.lower_fun(
                lambda *xs: _identity(name, where)(*xs), multiple_results=True
            )(ctx.replace(avals_out=ctx.avals_in), *args)
        return rule(ctx, *args, **params)

    return with_check


def _identity(name: str, where: str | None) -> Any:
    """Returns an identity that XLA's partitioner asks about its operands' shardings."""

    def same(*operands: Any) -> list[Any]:
        return list(operands)

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        found = tuple(x.sharding for x in operands)
        require_whole(name, found, lambda: where)
        return mesh, same, [x.sharding for x in results], found

    def rule(mesh: Any, operands: Any, results: Any) -> str:
        # Each axis is a factor of its own, which a result shares with its operand.
        terms = ", ".join(
            " ".join(f"x{i}_{j}" for j in range(len(x.shape)))
            for i, x in enumerate(operands)
        )
        return f"{terms} -> {terms}"

    whole = custom_partitioning(same)
    whole.def_partition(partition, sharding_rule=rule)
    return whole
