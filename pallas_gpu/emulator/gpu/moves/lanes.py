# SPDX-License-Identifier: Apache-2.0
"""Votes, matches and shuffles of the lanes of a warp, along the last axis.

Lanes do not diverge: a warp takes a branch as a whole, and a mask of lanes is a value.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pallas_gpu.layouts.registers.linear import WARP_LANES
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.moves.lanes import PRIMITIVES

_LANE = np.arange(WARP_LANES)


def _bits(x: Any) -> Any:
    return (x.astype(np.uint32) << _LANE.astype(np.uint32)).sum(-1, dtype=np.uint32)


def _ballot(x: Any) -> Any:
    return _bits(x)


def _vote(x: Any, kind: str) -> Any:
    return x.any(-1) if kind == "any" else x.all(-1)


def _match_any(x: Any) -> Any:
    words = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
    return _bits(words[..., :, None] == words[..., None, :])


def _shfl(x: Any, lane: Any, mode: str) -> Any:
    given = np.asarray(lane) & (WARP_LANES - 1)
    source = {
        "idx": given,
        "up": _LANE - given,
        "down": _LANE + given,
        "xor": _LANE ^ given,
    }[mode]
    source = np.where((source >= 0) & (source < WARP_LANES), source, _LANE)
    return np.take_along_axis(x, np.broadcast_to(source, x.shape), -1)


_MODELS = {
    "ballot": _ballot,
    "vote": _vote,
    "match_any": _match_any,
    "shfl": _shfl,
}


def _rule(name: str) -> Any:
    model: Any = _MODELS[name]

    def rule(*leaves: Any, tree: Any, **params: Any) -> Any:
        operands = jax.tree.unflatten(tree, leaves)
        operands["x"] = np.asarray(operands["x"])
        return model(**operands, **params)

    return rule


for _name, _primitive in PRIMITIVES.items():
    registry.register(_primitive, registry.RuleKind.EMULATE)(_rule(_name))
