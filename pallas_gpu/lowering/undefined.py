# SPDX-License-Identifier: Apache-2.0
"""Warnings about results that a kernel leaves undefined, whatever its arguments are.

The emulator refuses such kernels. A GPU runs them, and their callers may ignore the
result: for the compiler they are warnings.
"""

from __future__ import annotations

import math

from pallas_gpu import errors, types
from pallas_gpu.entry import check
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering import slow


def warn(params: CallParams) -> None:
    """Warns of results that nothing is stored to, or all CTAs at once.

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
    for name, aval, site in check.results.read_unwritten(body):
        _show(
            f"kernel {params.name}: {types.describe(aval)} ({name}) is read, and "
            "nothing is stored to it",
            "what is read is undefined",
            "if it is the block of a result, store to its reference: ref[...] = x",
            site.where or params.defined_at,
        )
    if math.prod(params.mesh.grid) > 1:
        _warn_of_race(params, refs)


def _warn_of_race(params: CallParams, refs: dict[object, str]) -> None:
    """Warns of elements that the CTAs overwrite with different values."""
    body, axes = params.jaxpr, params.mesh.grid_names
    stores = check.results.common_stores(body, refs)
    found = next((store for store in stores if store.differs(body, axes)), None)
    if found is None:
        return
    _show(
        f"kernel {params.name}: all CTAs store the same elements of {refs[found.ref]}",
        "nothing orders them: whose values remain is undefined",
        "index it by the position on the grid, jax.lax.axis_index(name); or let one "
        "CTA store, with plgpu.when",
        found.site.where or params.defined_at,
    )


def _show(what: str, effect: str, hint: str, where: str | None) -> None:
    place = where or "<kernel>:0"
    text = f"{what} ({place})\n  effect: {effect}\n  hint:   {hint}"
    slow.show(text, errors.UndefinedResultWarning, place)
