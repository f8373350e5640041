# SPDX-License-Identifier: Apache-2.0
"""Warnings about what a kernel leaves undefined: results, and SMEM that is read.

The emulator refuses a kernel where undefined elements matter. A GPU runs it, its
callers may ignore the result, and what is read may be unused: for the compiler they are
warnings.
"""

from __future__ import annotations

import math

from pallas_gpu import errors, types
from pallas_gpu.entry import check
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering import slow


def warn(params: CallParams) -> None:
    """Warns of results or SMEM without a store, or of results that all CTAs store.

    Results that are arguments too have the value of these where nothing is stored.
    """
    body = params.jaxpr
    aliased = {result for _, result in params.aliases}
    refs = {
        ref: f"result {i} ({types.describe(ref.aval)})"
        for i, ref in enumerate(body.invars[params.num_inputs :])
        if i not in aliased and ref.aval.size
    }
    for ref in check.results.unwritten(body, refs):
        _show(
            f"kernel {params.name}: nothing is stored to {refs[ref]}",
            "its elements are undefined",
            "store to its reference, ref[...] = x: `ref = x` renames it; or leave it "
            "out of the types of the results",
            params.defined_at,
        )
    for name, aval, where in check.results.read_unwritten(body):
        _show(
            f"kernel {params.name}: {types.describe(aval)} ({name}) is read, and "
            "nothing is stored to it",
            "what is read is undefined",
            "if it is the block of a result, store to its reference: ref[...] = x",
            where or params.defined_at,
        )
    if math.prod(params.mesh.grid) > 1:
        _warn_of_race(params, refs)


def _warn_of_race(params: CallParams, refs: dict[object, str]) -> None:
    """Warns of elements that the CTAs overwrite with different values."""
    body, mesh = params.jaxpr, params.mesh
    sizes = zip(mesh.grid_names, mesh.grid, strict=True)
    axes = {axis for axis, size in sizes if size > 1}
    stores = check.results.common_stores(body, refs)
    found = next((store for store in stores if store.axes & axes), None)
    if found is None:
        return
    _show(
        f"kernel {params.name}: all CTAs store the same elements of {refs[found.ref]}",
        "nothing orders them: whose values remain is undefined",
        "index it by the position on the grid, jax.lax.axis_index(name); or let one "
        "CTA store, with plgpu.when",
        found.where or params.defined_at,
    )


def _show(what: str, effect: str, hint: str, where: str | None) -> None:
    place = where or "<kernel>:0"
    text = f"{what} ({place})\n  effect: {effect}\n  hint:   {hint}"
    slow.show(text, errors.UndefinedResultWarning, place)
