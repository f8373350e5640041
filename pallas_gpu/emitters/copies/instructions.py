# SPDX-License-Identifier: Apache-2.0
"""The instructions of bulk copies, with and without tensor map.

One thread issues them.

What nvvm's operations do not express, or the plugin's serialization drops of them, is
inline assembly. PTX ISA, Data Movement: cp.async.bulk.tensor. Coordinates are innermost
first.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from pallas_gpu.emitters import module
from pallas_gpu.emitters.addressing import global_pointer
from pallas_gpu.emitters.elected import instruction


def load(
    pointer: ir.Value,
    descriptor: ir.Value,
    coordinates: Sequence[ir.Value],
    barrier: ir.Value,
    *,
    of_pair: bool = False,
    mask: ir.Value | None = None,
    policy: ir.Value | None = None,
    by: ir.Value | None = None,
) -> None:
    """Copies a box to SMEM. PTX: `cp.async.bulk.tensor.shared::cluster.global`.

    Args:
      pointer: `!llvm.ptr<3>` of the box in this block's SMEM.
      descriptor: `!llvm.ptr` of the tensor map.
      coordinates: i32 each.
      barrier: `!llvm.ptr<3>` of the mbarrier that counts the bytes, or `!llvm.ptr<7>`.
      of_pair: whether it may be the mbarrier of either block of a pair
        (`.cta_group::2`, since sm_100a).
      mask: i16, the ranks of the blocks that get the box, in a multicast.
      policy: i64, of `cache_policy`.
      by: i1, the predicate of the threads that issue it; None is all.
    """
    rank = len(coordinates)
    text = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes"
        f"{'' if mask is None else '.multicast::cluster'}"
        f"{'.cta_group::2' if of_pair else ''}{_hint(policy)} "
        f"[$0], [$1, {{{_at(2, rank)}}}], [${rank + 2}]"
    )
    operands = [_address(pointer), descriptor, *coordinates, _address(barrier)]
    constraints = f"rl{'r' * rank}r"
    if mask is not None:
        text += f", ${len(operands)}"
        operands.append(mask)
        constraints += "h"
    _hinted(text, operands, constraints, policy, by)


def store(
    pointer: ir.Value,
    descriptor: ir.Value,
    coordinates: Sequence[ir.Value],
    policy: ir.Value | None = None,
) -> None:
    """Copies a box to GMEM. PTX: `cp.async.bulk.tensor.global.shared::cta`."""
    nvvm.CpAsyncBulkTensorSharedCTAToGlobalOp(
        descriptor, pointer, coordinates, l2CacheHint=policy
    )


def load_im2col(
    pointer: ir.Value,
    descriptor: ir.Value,
    coordinates: Sequence[ir.Value],
    barrier: ir.Value,
    offsets: Sequence[ir.Value],
    by: ir.Value | None = None,
) -> None:
    """Copies a pixel of each of some windows to SMEM. PTX: `cp.async.….im2col`.

    Args:
      pointer, descriptor, barrier, by: as of `load`.
      coordinates: i32, of the first window.
      offsets: i16, of the pixel in a window.
    """
    rank, many = len(coordinates), len(offsets)
    text = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.im2col"
        ".mbarrier::complete_tx::bytes"
        f" [$0], [$1, {{{_at(2, rank)}}}], [${rank + 2}], {{{_at(rank + 3, many)}}}"
    )
    operands = [_address(pointer), descriptor, *coordinates, _address(barrier)]
    constraints = ["r", "l", *["r"] * rank, "r", *["h"] * many]
    instruction(text, [*operands, *offsets], constraints, by)


def load_rows(
    pointer: ir.Value,
    descriptor: ir.Value,
    coordinates: Sequence[ir.Value],
    barrier: ir.Value,
) -> None:
    """Copies columns of four rows to SMEM. PTX: `cp.async.bulk.tensor.2d.…gather4`.

    Since: sm_100a.

    Args:
      pointer, descriptor, barrier: as of `load`; a box of the map is one row.
      coordinates: i32, the first column and four rows.
    """
    text = (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4"
        ".mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4, $5, $6}], [$7]"
    )
    operands = [_address(pointer), descriptor, *coordinates, _address(barrier)]
    instruction(text, operands, ["r", "l", *["r"] * 6])


def store_rows(
    pointer: ir.Value, descriptor: ir.Value, coordinates: Sequence[ir.Value]
) -> None:
    """Copies columns of four rows to GMEM. PTX: `cp.async.bulk.tensor.2d.…scatter4`.

    Since: sm_100a.

    Args:
      pointer, descriptor, coordinates: as of `load_rows`.
    """
    text = (
        "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group "
        "[$0, {$2, $3, $4, $5, $6}], [$1]"
    )
    instruction(text, [descriptor, _address(pointer), *coordinates], "lrrrrrr")


def reduce(
    operation: str,
    pointer: ir.Value,
    descriptor: ir.Value,
    coordinates: Sequence[ir.Value],
    policy: ir.Value | None = None,
) -> None:
    """Combines a box with GMEM. PTX: `cp.reduce.async.bulk.tensor`.

    Inline assembly, since the plugin's serialization drops the attribute of nvvm's op.
    """
    rank = len(coordinates)
    text = (
        f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{operation}.tile"
        f".bulk_group{_hint(policy)} [$0, {{{_at(2, rank)}}}], [$1]"
    )
    operands = [descriptor, _address(pointer), *coordinates]
    _hinted(text, operands, f"lr{'r' * rank}", policy)


def prefetch(descriptor: ir.Value, coordinates: Sequence[ir.Value]) -> None:
    """Fetches a box to L2. PTX: `cp.async.bulk.prefetch.tensor.L2.global.tile`.

    Inline assembly, since the compiler crashes on nvvm's operation.
    """
    rank = len(coordinates)
    at = _at(1, rank)
    text = f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile [$0, {{{at}}}]"
    instruction(text, [descriptor, *coordinates], f"l{'r' * rank}")


def prefetch_line(source: ir.Value, size_bytes: int) -> None:
    """Fetches adjacent bytes to L2. PTX: `cp.async.bulk.prefetch.L2.global`.

    Args:
      source: pointer to GMEM.
      size_bytes: of the bytes; both are multiples of 16.
    """
    size = module.current().i32(size_bytes)
    operands = [global_pointer(source), size]
    instruction("cp.async.bulk.prefetch.L2.global [$0], $1", operands, "lr")


def load_line(
    pointer: ir.Value,
    source: ir.Value,
    size_bytes: int,
    barrier: ir.Value,
    policy: ir.Value | None = None,
    by: ir.Value | None = None,
) -> None:
    """Copies adjacent bytes to SMEM. PTX: `cp.async.bulk.shared::cluster.global`.

    Args:
      pointer: `!llvm.ptr<3>` of the destination in this block's SMEM.
      source: pointer to GMEM.
      size_bytes: a multiple of 16, as both addresses.
      barrier: `!llvm.ptr<3>` of the mbarrier that counts the bytes.
      policy: i64, of `cache_policy`.
      by: i1, the predicate of the threads that issue it; None is all.
    """
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        f"{_hint(policy)} [$0], [$1], $2, [$3]"
    )
    size = module.current().i32(size_bytes)
    operands = [_address(pointer), global_pointer(source), size, _address(barrier)]
    _hinted(text, operands, "rlrr", policy, by)


def store_line(
    pointer: ir.Value,
    target: ir.Value,
    size_bytes: int,
    policy: ir.Value | None = None,
) -> None:
    """Copies adjacent bytes to GMEM. PTX: `cp.async.bulk.global.shared::cta`.

    Args:
      pointer: `!llvm.ptr<3>` of the source.
      target: pointer to GMEM.
      size_bytes, policy: as of `load_line`.
    """
    form = f"cp.async.bulk.global.shared::cta.bulk_group{_hint(policy)}"
    _line_to_gmem(form, pointer, target, size_bytes, policy)


def reduce_line(
    suffix: str,
    pointer: ir.Value,
    target: ir.Value,
    size_bytes: int,
    policy: ir.Value | None = None,
) -> None:
    """Combines adjacent elements with GMEM. PTX: `cp.reduce.async.bulk`.

    Args:
      suffix: operation and element type, e.g. `add.noftz.bf16`.
      pointer, target, size_bytes, policy: as of `store_line`.
    """
    form = "cp.reduce.async.bulk.global.shared::cta.bulk_group"
    form += f"{_hint(policy)}.{suffix}"
    _line_to_gmem(form, pointer, target, size_bytes, policy)


def _line_to_gmem(
    form: str,
    pointer: ir.Value,
    target: ir.Value,
    size_bytes: int,
    policy: ir.Value | None,
) -> None:
    text = f"{form} [$0], [$1], $2"
    size = module.current().i32(size_bytes)
    _hinted(text, [global_pointer(target), _address(pointer), size], "lrr", policy)


def _at(first: int, count: int) -> str:
    """Coordinates: operands from a number on."""
    return ", ".join(f"${first + i}" for i in range(count))


def _hinted(
    text: str,
    operands: list[ir.Value],
    constraints: str,
    policy: ir.Value | None,
    by: ir.Value | None = None,
) -> None:
    if policy is not None:
        text += f", ${len(operands)}"
        operands.append(policy)
        constraints += "l"
    instruction(text, operands, constraints, by)


def cache_policy(hint: str | None) -> ir.Value | None:
    """i64: how the L2 cache treats what a copy accesses; None for no hint.

    PTX: `createpolicy.fractional`. Since: sm_80.

    Args:
      hint: the name of a primary priority, e.g. `evict_first`.
    """
    if hint is None:
        return None
    text = f"createpolicy.fractional.L2::{hint}.b64 $0, 1.0;"
    i64 = ir.IntegerType.get_signless(64)
    return module.current().hoisted(
        ("cache policy", hint), lambda: llvm.inline_asm(i64, [], text, "=l")
    )


def _hint(policy: ir.Value | None) -> str:
    return "" if policy is None else ".L2::cache_hint"


def _address(pointer: ir.Value) -> ir.Value:
    """The address in SMEM as PTX's 32-bit register."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), pointer)
