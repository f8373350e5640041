# SPDX-License-Identifier: Apache-2.0
"""SMEM scratch of the reductions and relayouts of a warpgroup, or of its warps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu import errors
from pallas_gpu.emitters import addressing
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.moves import relayout
from pallas_gpu.emitters.moves.image import MOST_EMITTED
from pallas_gpu.emitters.moves.scratch import SmemScratch, require
from pallas_gpu.emitters.registers import RegisterArray
from pallas_gpu.entry.call import CallParams
from pallas_gpu.layouts.moves import costs, rates
from pallas_gpu.layouts.moves import relayout as plans
from pallas_gpu.layouts.moves.reductions import plan_reduction
from pallas_gpu.layouts.registers.placement import Placement, describe
from pallas_gpu.lowering import notes, slow
from pallas_gpu.lowering.context import KernelState
from pallas_gpu.resources import SCRATCH_GRANULE_BYTES, Plan
from pallas_gpu.types import LoweringSemantics

# Scratch that an operation may ask for where it can also do with less, in rounds: more
# leaves SMEM for fewer blocks of an SM. Estimate.
_MOST_WANTED_BYTES = 1 << 16


def available_bytes(kernel: KernelState) -> int:
    """Returns the bytes that each warpgroup may use, or each warp in code of warps."""
    return _share(kernel, _issuers(kernel))


def _share(kernel: KernelState, count: int) -> int:
    share = kernel.plan.scratch_room_bytes // count
    return share - share % SCRATCH_GRANULE_BYTES


def _issuers(kernel: KernelState) -> int:
    """Returns how many execute the code at once: the scratch is divided among them."""
    builder = kernel.builder
    return builder.spec.threads // builder.issuer_threads


def what_to_do(
    plan: Plan, params: CallParams, error: errors.OutOfResources
) -> str | None:
    """Returns the hint of an error of an operation for which there is no scratch.

    Args:
      plan: the plan of the kernel that was lowered.
      params: the kernel.
      error: what the operation has raised; it knows neither the kernel's memory nor its
        semantics.
    """
    hint = error.hint
    if error.resource != "SMEM":
        return hint
    if error.used_bytes * params.mesh.warpgroups > plan.scratch_free_bytes:
        hint = "the arrays occupy the remaining SMEM: use smaller or fewer arrays"
    if params.compiler_params.lowering_semantics is LoweringSemantics.Warpgroup:
        return hint
    return (
        f"{hint}; or give the operand a layout in which warps do not share what is "
        "combined (plgpu.load with layout): under Warpgroup semantics the compiler "
        "looks for one"
    )


def of_issuer(kernel: KernelState) -> SmemScratch | None:
    """Returns the scratch of the running warpgroup or warp, None where there is none.

    The first call allocates it.
    """
    bytes_each = available_bytes(kernel)
    if not bytes_each:
        return None
    kernel.plan = kernel.plan.with_scratch()
    builder = kernel.builder
    pointer = builder.smem_pointer(kernel.plan.scratch_offset_bytes)
    warpgroups, in_warp = builder.spec.warpgroups, builder.issuer == "warp"
    if warpgroups > 1:
        distance = _distance(kernel, "warpgroup", _share(kernel, warpgroups))
        pointer = addressing.offset_pointer(
            pointer, arith.muli(builder.threads.warpgroup, distance)
        )
    if in_warp:
        distance = _distance(kernel, "warp", bytes_each)
        pointer = addressing.offset_pointer(
            pointer, arith.muli(builder.threads.warp, distance)
        )
    return SmemScratch(pointer, bytes_each)


def _distance(kernel: KernelState, of: str, bytes_each: int) -> ir.Value:
    """Returns the distance of two issuers' scratch, which grows with the scratch.

    Code that was emitted for a smaller scratch uses the same constant: otherwise their
    parts would overlap.
    """
    i32 = ir.IntegerType.get_signless(32)
    number = ir.IntegerAttr.get(i32, bytes_each)
    constant = kernel.builder.hoisted(
        ("distance of scratch", of), lambda: arith.constant(i32, number)
    )
    constant.owner.attributes["value"] = number
    return constant


def for_data(kernel: KernelState, wanted_bytes: int) -> SmemScratch | None:
    """Returns scratch for data that can also go through less of it, in rounds.

    None where there is none.
    """
    moved = 2 * wanted_bytes / rates.WAVEFRONT_BYTES * rates.SMEM_WAVEFRONT
    cycles, what = moved + costs.EXCHANGE_CYCLES, f"{wanted_bytes} bytes"
    notes.take(lambda: notes.Conversion(what, "", "", wanted_bytes, cycles))
    return _in_rounds(kernel, wanted_bytes)


def _in_rounds(kernel: KernelState, wanted_bytes: int) -> SmemScratch | None:
    result = _grown(kernel, min(wanted_bytes, _MOST_WANTED_BYTES))
    if result is not None and wanted_bytes > MOST_EMITTED * result.size_bytes:
        slow.warn(
            "data moves between threads a little at a time: "
            f"{-(-wanted_bytes // result.size_bytes)} rounds, each with two barriers",
            f"{result.size_bytes} bytes of scratch for {wanted_bytes}",
            "leave more SMEM free, and reduction_scratch_bytes unset or larger",
            kernel.where,
        )
    return result


def _grown(kernel: KernelState, wanted_bytes: int) -> SmemScratch | None:
    """Returns the scratch, which grows within the remaining SMEM."""
    issuers = _issuers(kernel)
    limit = kernel.plan.scratch_limit_bytes
    wanted = min(wanted_bytes, limit // issuers)
    if wanted > available_bytes(kernel):
        granules = -(-wanted // SCRATCH_GRANULE_BYTES)
        room = granules * SCRATCH_GRANULE_BYTES * issuers
        kernel.plan = kernel.plan.with_room(min(room, limit))
    return of_issuer(kernel)


def relayouted(kernel: KernelState, x: RegisterArray, target: Placement) -> Any:
    """Returns an array in another layout; little scratch means rounds."""
    if x.layout == target:
        return x
    bits, available = dtypes.bits(x.dtype), available_bytes(kernel)
    wanted = plans.scratch_bytes(x.layout, target, bits, available)
    room = _in_rounds(kernel, wanted) if wanted else None
    held = available if room is None else room.size_bytes
    notes.take(
        lambda: notes.Conversion(
            f"{x.dtype}{list(x.shape)}",
            describe(x.layout),
            describe(target),
            wanted,
            costs.relayout_cost(x.layout, target, bits, held) or 0.0,
        )
    )
    return relayout.relayout(x, target, room)


def for_reduction(
    kernel: KernelState, x: RegisterArray, axes: Sequence[int]
) -> SmemScratch | None:
    """Returns the scratch if the reduction crosses warps.

    Raises:
      OutOfResources: the scratch is too small.
    """
    bits = dtypes.bits(x.dtype)
    plan = plan_reduction(x.layout, tuple(axes))
    if not plan.warps:
        return None
    wanted, least = plan.scratch_bytes(bits), plan.least_bytes(bits)
    what = f"a reduction across warps of {x.dtype}{list(x.shape)} over axes {axes}"
    return require(for_data(kernel, wanted), least, what)


def of_bytes(
    kernel: KernelState, needed: int, what: str, got: str
) -> SmemScratch | None:
    """Returns the scratch for an operation that needs some; None if it needs none.

    Args:
      needed: bytes for one warpgroup, or for one warp.
      what, got: the operation and its operand, for the message.

    Raises:
      OutOfResources: the scratch is too small.
    """
    if not needed:
        return None
    return require(_grown(kernel, needed), needed, f"{what} of {got}")
