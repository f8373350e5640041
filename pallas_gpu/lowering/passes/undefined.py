# SPDX-License-Identifier: Apache-2.0
"""Warnings about what a kernel leaves undefined: results, and SMEM that is read.

The emulator refuses a kernel where undefined elements matter. A GPU runs it, its
callers may ignore the result, and what is read may be unused: for the compiler they are
warnings.
"""

from __future__ import annotations

from pallas_gpu import errors, types
from pallas_gpu.checks.stores import Stores, read_unwritten
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering import slow
from pallas_gpu.lowering.machine import Build


def warn(build: Build) -> Build:
    """Warns of results, parts of them or SMEM without a store, or of shared stores.

    Results that are arguments too have the value of these where nothing is stored.
    """
    params, body = build.params, build.params.jaxpr
    aliased = {result for _, result in params.aliases}
    refs = {
        ref: f"result {i} ({types.describe(ref.aval)})"
        for i, ref in enumerate(body.invars[params.num_inputs :])
        if i not in aliased and ref.aval.size
    }
    stores = Stores(body, refs, params.mesh.axes)
    for ref in stores.unwritten():
        _show(
            f"kernel {params.name}: nothing is stored to {refs[ref]}",
            "its elements are undefined",
            "store to its reference, ref[...] = x: `ref = x` renames it; or leave it "
            "out of the types of the results",
            params.defined_at,
        )
    for name, aval, where in read_unwritten(body):
        _show(
            f"kernel {params.name}: {types.describe(aval)} ({name}) is read, and "
            "nothing is stored to it",
            "what is read is undefined",
            "if it is the block of a result, store to its reference: ref[...] = x",
            where or params.defined_at,
        )
    for ref, part, where in stores.missing():
        _show(
            f"kernel {params.name}: nothing is stored to elements {part} of "
            f"{refs[ref]}",
            "they are undefined",
            "compare where the CTAs and the loops store with the result's shape; a "
            "result that is an argument too, by aliasing, keeps its elements",
            where or params.defined_at,
        )
    _warn_of_race(params, refs, stores)
    return build


def _warn_of_race(params: CallParams, refs: dict[object, str], stores: Stores) -> None:
    """Warns of elements that CTAs overwrite with different values."""
    mesh = params.mesh
    several = {name for name, size in mesh.axes if size > 1}
    grid, cluster = (
        several.intersection(x) for x in (mesh.grid_names, mesh.cluster_names)
    )
    found = next((x for x in stores.common(grid, cluster) if x[1]), None)
    if found is None:
        return
    ref, axes, where = found
    names = sorted(map(repr, axes))
    _show(
        f"kernel {params.name}: the CTAs along {', '.join(names)} store the same "
        f"elements of {refs[ref]}",
        "nothing orders them: whose values remain is undefined",
        f"index it by the position too, jax.lax.axis_index({names[0]}); or let one CTA "
        "store, with plgpu.when",
        where or params.defined_at,
    )


def _show(what: str, effect: str, hint: str, where: str | None) -> None:
    place = where or "<kernel>:0"
    text = f"{what} ({place})\n  effect: {effect}\n  hint:   {hint}"
    slow.show(text, errors.UndefinedResultWarning, place)
