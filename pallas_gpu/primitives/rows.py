# SPDX-License-Identifier: Apache-2.0
"""Copies of rows that an array of indices names: gather to SMEM, scatter to GMEM."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_gpu import _jax, arch, errors, types
from pallas_gpu.primitives import _engines
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.copies import views

# Threads copy rows of other sizes than those of bulk copies.
_PROXIES: tuple[registry.Proxy, ...] = ("generic", "async")

gather_rows_p = registry.define(
    "gather_rows",
    "rows",
    called="copy_gmem_to_smem",
    reads=("src",),
    writes=("dst", "barrier"),
    asynchronous=True,
    proxies=_PROXIES,
    remote=("src",),
    releases=True,
    feature=arch.Feature.TMA,
    by_warp=False,
)
scatter_rows_p = registry.define(
    "scatter_rows",
    "rows",
    called="copy_smem_to_gmem",
    reads=("src",),
    writes=("dst",),
    asynchronous=True,
    proxies=_PROXIES,
    remote=("dst",),
    feature=arch.Feature.TMA,
    by_warp=False,
)


def split(ref: Any, who: str) -> tuple[Any, Any] | None:
    """Returns a reference with all rows, and the indices of those that are meant.

    None for a reference without an array of indices.
    """
    if not isinstance(ref, _jax.TransformedRef):
        return None
    steps = tuple(ref.transforms)
    arrays = [step for step in steps if _index_arrays(step)]
    if not arrays:
        return None
    last = steps[-1]
    indices = _index_arrays(last)
    leads = bool(indices) and indices[0] is last.indices[0]
    if len(arrays) > 1 or len(indices) != 1 or not leads or indices[0].ndim != 1:
        raise errors.UnsupportedError(
            f"{who}: these indices do not name rows",
            expected="one array of indices of rank 1, of the first dimension, in the "
            "last index expression",
            got=f"{len(indices)} array(s) of indices in {types.describe(ref)}",
            hint="write ref.at[part].at[rows, columns]",
        )
    whole = _jax.Slice(0, last.shape[0], 1)
    every = _jax.indexer([whole, *last.indices[1:]], (), tuple(last.shape))
    rows = jnp.asarray(indices[0]).astype(jnp.int32)
    return types.RefView(ref.ref, (*steps[:-1], every)), rows


def _index_arrays(step: Any) -> list[Any]:
    found = getattr(step, "indices", ())
    return [x for x in found if getattr(x, "ndim", 0) > 0 and not _is_ref(x)]


def _is_ref(x: Any) -> bool:
    return types.base_aval(x) is not None


def require_alone(has_others: bool, who: str) -> None:
    """Raises UnsupportedError for an option that copies of rows do not have."""
    if has_others:
        raise errors.UnsupportedError(
            f"{who}: copies of rows by indices have none of these options",
            expected="no collective_axes, oob_mode, implementation and reduction_op",
            got="an array of indices, and one of them",
            hint="leave it out",
        )


def gather(
    src: Any,
    rows: Any,
    dst: types.Ref,
    barrier: Any,
    predicate: Any,
) -> None:
    """Starts copies of rows of GMEM to SMEM, in the order of their indices.

    PTX: cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4, one for four rows
    that are adjacent in SMEM (sm_100a); or cp.async.bulk.shared::cluster.global, one
    for each row, if rows are adjacent multiples of 16 bytes in both memories; else
    cp.async or ld.global and st.shared.
    """
    who = "copy_gmem_to_smem"
    src, dst = views.plain(src, who), views.plain(dst, who)
    operands = {
        "src": src,
        "rows": rows,
        "dst": dst,
        "barrier": barrier,
        "predicate": predicate,
    }
    ops.bind(gather_rows_p, operands)


def scatter(
    src: types.Ref, dst: Any, rows: Any, predicate: Any, commit_group: bool
) -> None:
    """Starts copies of the rows of SMEM to rows of GMEM.

    PTX: cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4, one for four rows
    (sm_100a); cp.async.bulk.global.shared::cta, one for each row; or ld.shared and
    st.global.
    """
    who = "copy_smem_to_gmem"
    src, dst = views.plain(src, who), views.plain(dst, who)
    operands = {"src": src, "dst": dst, "rows": rows, "predicate": predicate}
    ops.bind(scatter_rows_p, operands, commit_group=commit_group)


@registry.checks(gather_rows_p, scatter_rows_p)
def _check_rows(op: Any, mesh: types.Mesh) -> None:
    gmem, smem = op.access_to(types.GMEM), op.access_to(types.SMEM)
    _engines.require_elements(gmem.window)
    sides = map(_engines.Side.accessed, (gmem, smem))
    _engines.check_threads(*map(row, sides), store=gmem.writes)


def row(side: _engines.Side) -> _engines.Side:
    """Returns the first row of a side of a copy of rows."""
    one = side.window.slice([0] * len(side.window.axes), [None, *side.window.shape[1:]])
    return dataclasses.replace(side, window=one)
