# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of references in received bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, types
from pallas_gpu.bridge.rules import Evaluation, rule
from pallas_gpu.primitives import atomics
from pallas_gpu.primitives.devices.peers import multicast_ref, remote_ref
from pallas_gpu.primitives.registers import load, store


def view(ref: Any, steps: Sequence[Any]) -> types.RefView:
    """Returns a part of a reference.

    Args:
      ref: a reference of this package, or a part of one.
      steps: index and transpose steps as JAX records them.

    Raises:
      OutOfBoundsError, UnsupportedError: a step is not supported.
    """
    part = types.as_view(ref)
    for step in steps:
        match step:
            case _jax.NDIndexer():
                part = part.at[tuple(step.indices)]
            case _jax.TransposeTransform():
                part = part.transpose(step.permutation)
            case _jax.ReshapeTransform():
                part = part.reshape(step.shape)
            case _jax.BitcastTransform():
                part = part.bitcast(step.dtype)
            case _ if type(step).__name__ == "PeerMemRef":
                kind = types.DeviceIdType[step.device_id_type.name]
                part = remote_ref(part, step.device_id, kind)
            case _ if type(step).__name__ == "MulticastRef":
                part = multicast_ref(part, step.collective_axes)
            case _:
                part = types.RefView(part.ref, (*part.transforms, step))
    return part


@rule("get")
def _get(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    ref, *leaves = operands
    part = view(ref, jax.tree.unflatten(eqn.params["tree"], leaves))
    return [part.get()]


@rule("swap")
def _swap(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    ref, value, *leaves = operands
    part = view(ref, jax.tree.unflatten(eqn.params["tree"], leaves))
    return [part.swap(value)]


@rule("addupdate")
def _addupdate(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    ref, value, *leaves = operands
    view(ref, jax.tree.unflatten(eqn.params["tree"], leaves)).addupdate(value)
    return []


@rule("masked_load")
def _masked_load(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    ref, steps, mask, other = jax.tree.unflatten(eqn.params["args_tree"], operands)
    part = view(ref, steps)
    return [part.get() if mask is None else load(part, mask=mask, other=other)]


@rule("masked_swap")
def _masked_swap(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    ref, steps, value, mask = jax.tree.unflatten(eqn.params["args_tree"], operands)
    part = view(ref, steps)
    if mask is None:
        return [part.swap(value)]
    unread = isinstance(eqn.outvars[0], _jax.DropVar)
    old = jnp.zeros_like(value) if unread else load(part, mask=mask)
    store(part, (), value, mask=mask)
    return [old]


@rule("atomic_rmw")
def _atomic_rmw(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    ref, steps, value, mask = jax.tree.unflatten(eqn.params["args_tree"], operands)
    update = getattr(atomics, f"atomic_{eqn.params['atomic_type'].value}")
    return [update(view(ref, steps), value, mask=mask)]


@rule("atomic_cas")
def _atomic_cas(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    return [atomics.atomic_cas(*operands)]
