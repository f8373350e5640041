# SPDX-License-Identifier: Apache-2.0
"""TMA: copies of boxes in both directions, and bulk groups (PTX ISA, cp.async.bulk)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import accesses
from pallas_gpu.lockstep.assembly import parse
from pallas_gpu.lockstep.copies import reductions
from pallas_gpu.lockstep.copies.descriptors import described
from pallas_gpu.lockstep.copies.tensor_map import RowsMap, TensorMap, WindowsMap
from pallas_gpu.lockstep.engine import Groups, OutOfBoundsError
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.predication import guarded
from pallas_gpu.lockstep.program import Program, Step, runs
from pallas_gpu.lockstep.registers import assembles, form_of
from pallas_gpu.lockstep.sync import mbarrier


def _buffer(strand: Any, base: int) -> tuple[Any, int]:
    memory = strand.cta.cluster.launch.buffer(base >> accesses.BUFFER_SHIFT)
    return memory, base & (1 << accesses.BUFFER_SHIFT) - 1


@dataclasses.dataclass
class _Issue:
    """One thread's copy: its map, coordinates, and addresses."""

    strand: Any
    row: int
    thread: int
    tensor_map: TensorMap
    start: tuple[int, ...]
    address: int


def _issues(
    strand: Any,
    descriptor: int,
    coordinates: list[int],
    smem: int,
    of_rows: bool = False,
):
    """The copies that the active threads issue, with the lane of each."""
    env = strand.env
    for lane in map(int, np.flatnonzero(strand.active())):

        def held(slot: int, lane: int = lane) -> int:
            return int(strand.per_lane(env[slot])[lane])

        found = described(strand, held(descriptor), lane)
        found = RowsMap.of(found) if of_rows else found
        # Coordinates are s32.
        start = tuple((held(c) ^ 1 << 31) - (1 << 31) for c in coordinates)
        if len(start) != found.rank:
            raise PtxError(f"{len(start)} coordinates for {found}")
        row, thread = int(strand.row_of_lane[lane]), int(strand.threads[lane])
        yield lane, _Issue(strand, row, thread, found, start, held(smem))


def _in_gmem(issue: _Issue) -> tuple[Any, np.ndarray, np.ndarray]:
    """The memory of a copy's tensor, the bytes in it, and which elements are inside."""
    tensor_map = issue.tensor_map
    offset, inside = tensor_map.in_gmem(issue.start)
    memory, base = _buffer(issue.strand, tensor_map.base)
    places = base + offset[inside, None] + np.arange(tensor_map.dtype.itemsize)
    if places.size and not 0 <= places.min() <= places.max() < memory.data.size:
        raise OutOfBoundsError(f"{tensor_map} reaches out of {memory.name}")
    return memory, places, inside


# --- hints to the L2 cache ------------------------------------------------------------

# Policies are opaque: these numbers are those of the model alone.
_POLICIES = {"evict_normal": 0x51, "evict_first": 0x52, "evict_last": 0x53}
_POLICY = re.compile(rf"createpolicy\.fractional\.L2::({'|'.join(_POLICIES)})\.b64")


@assembles("createpolicy.")
def _create_policy(program: Program, op: ir.Operation, text: str) -> Step:
    _, match = form_of(text, _POLICY)
    (out,) = program.outputs(op)
    value = np.array([_POLICIES[match[1]]], np.uint64)

    def create(strand: Any) -> None:
        strand.env[out] = value

    return create


def check_policy(strand: Any, policy: int | None = None) -> None:
    """Raises unless a hint is what createpolicy gives (PTX ISA, createpolicy)."""
    if policy is None:
        return
    held = set(strand.per_lane(strand.env[policy])[strand.active()].tolist())
    if not held <= set(_POLICIES.values()):
        raise PtxError(f"cache hints {held} that createpolicy does not give")


# --- GMEM to SMEM ---------------------------------------------------------------------


def _require_tiles(op: ir.Operation, offsets: list[int]) -> None:
    mode = str(op.attributes["mode"]) if "mode" in op.attributes else "tile"
    if offsets or "tile" not in mode or "gather" in mode or "scatter" in mode:
        raise NotModelled(f"{op.name} {mode}")


_LOAD = re.compile(
    r"cp\.async\.bulk\.tensor\.(\d)d\.shared::cluster\.global\.tile"
    r"\.mbarrier::complete_tx::bytes(\.multicast::cluster)?(\.cta_group::2)?"
    r"(\.L2::cache_hint)?"
)


@assembles("cp.async.bulk.tensor.")
def _load(program: Program, op: ir.Operation, text: str) -> Step:
    statement, match = form_of(text, _LOAD)
    inputs = program.inputs(op)
    _, _, operands = text.partition(" [")
    numbers = [int(n) for n in re.findall(r"\$(\d+)", operands)]
    target, descriptor, *coordinates = (inputs[n] for n in numbers)
    policy = coordinates.pop() if match[4] else None
    mask = coordinates.pop() if match[2] else None
    barrier = coordinates.pop()
    if len(coordinates) != int(match[1]):
        raise PtxError(f"{len(coordinates)} coordinates in {text}")
    of_pair = match[3] is not None

    def load(strand: Any) -> None:
        env = strand.env
        check_policy(strand, policy)
        for lane, issue in _issues(strand, descriptor, coordinates, target):
            signal = int(strand.per_lane(env[barrier])[lane])
            tracker, local = accesses.cluster_address(strand, signal)
            cta, address = accesses.cluster_address(strand, issue.address)
            ctas, targets = strand.cta.cluster.ctas, [strand.cta]
            if mask is not None:
                bits = int(strand.per_lane(env[mask])[lane])
                if not bits or bits >> len(ctas):
                    raise PtxError(
                        f"multicast to {bits:#x} in a cluster of {len(ctas)}"
                    )
                targets = [c for c in ctas if bits >> c.rank & 1]
            elif cta is not strand.cta:
                raise NotModelled("a tensor copy into another block's SMEM")
            trackers = targets
            if of_pair:
                # Each destination signals that CTA of its pair whose rank has the
                # parity of the mbarrier's.
                trackers = [ctas[c.rank // 2 * 2 + tracker.rank % 2] for c in targets]
            if mask is None and tracker not in trackers:
                raise PtxError("an mbarrier that the copy may not signal")
            work = _LoadWork(issue, address, local, targets, trackers)
            strand.cta.cluster.launch.scheduler.in_flight.append(work)

    return guarded(inputs, statement, load)


_GATHER = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4"
    ".mbarrier::complete_tx::bytes"
)


@assembles(_GATHER, first=True)
def _load_rows(program: Program, op: ir.Operation, text: str) -> Step:
    (statement,) = parse(text)
    inputs = program.inputs(op)
    target, descriptor, *coordinates, barrier = inputs
    written = f"{_GATHER} [$0], [$1, {{$2, $3, $4, $5, $6}}], [$7];"
    if text != written or len(inputs) != 8 or statement.guard:
        raise NotModelled(f"llvm.inline_asm {text[:80]}")

    def load(strand: Any) -> None:
        found = _issues(strand, descriptor, coordinates, target, of_rows=True)
        for lane, issue in found:
            local = int(strand.per_lane(strand.env[barrier])[lane])
            work = _LoadWork(issue, issue.address, local, [strand.cta])
            strand.cta.cluster.launch.scheduler.in_flight.append(work)

    return load


# In front of the unit whose prefix is that of the names.


_IM2COL = {
    rank: f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.im2col"
    ".mbarrier::complete_tx::bytes"
    for rank in (3, 4, 5)
}


@assembles(*_IM2COL.values(), first=True)
def _load_im2col(program: Program, op: ir.Operation, text: str) -> Step:
    (statement,) = parse(text)
    inputs = program.inputs(op)
    unguarded = inputs[: len(inputs) - bool(statement.guard)]
    rank = (len(unguarded) - 1) // 2
    at = ", ".join(f"${i + 2}" for i in range(rank))
    by = ", ".join(f"${i + 3 + rank}" for i in range(rank - 2))
    written = f"{_IM2COL[rank]} [$0], [$1, {{{at}}}], [${rank + 2}], {{{by}}};"
    if not text.endswith(written):
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    target, descriptor, *rest = unguarded
    barrier = rest.pop(rank)

    def load(strand: Any) -> None:
        for lane, issue in _issues(strand, descriptor, rest, target):
            if not isinstance(issue.tensor_map, WindowsMap):
                raise PtxError(f"windows through {issue.tensor_map}")
            local = int(strand.per_lane(strand.env[barrier])[lane])
            work = _LoadWork(issue, issue.address, local, [strand.cta])
            strand.cta.cluster.launch.scheduler.in_flight.append(work)

    return guarded(inputs, statement, load)


class _LoadWork:
    """A copy of a box to one block or several, each with its own mbarrier.

    Args:
      trackers: the blocks with these mbarriers; default: the same.
    """

    def __init__(
        self, issue: _Issue, address: int, barrier: int, targets, trackers=None
    ) -> None:
        self._issue = issue
        self._targets = targets
        self._places = issue.tensor_map.in_smem(address) - accesses.SMEM_BASE
        self._barriers = [mbarrier.find(cta, barrier) for cta in trackers or targets]
        for cta, target in zip(targets, self._barriers, strict=True):
            target.check_known(issue.row, "a copy")
            cta.smem.begin_write(issue.row, self._places.reshape(-1), "a tensor copy")
        issue.tensor_map.check_start(issue.start, store=False)
        memory, places, _ = _in_gmem(issue)
        memory.check_visible(np.array([issue.row]), places, "a tensor copy reads")

    def complete(self) -> None:
        """The bytes arrive: read only now, as late as the waits allow."""
        issue, tensor_map = self._issue, self._issue.tensor_map
        memory, places, inside = _in_gmem(issue)
        data = np.broadcast_to(tensor_map.outside, self._places.shape).copy()
        data[inside] = memory.data[places]
        for cta, barrier in zip(self._targets, self._barriers, strict=True):
            agent, epoch = cta.clocks.agent(barrier.agent_key), barrier.phase + 1
            cta.smem.end_write(self._places, data, agent, epoch)
            barrier.complete_tx(tensor_map.bytes, agent, epoch)


_PREFETCH = re.compile(r"cp\.async\.bulk\.prefetch\.tensor\.(\d)d\.L2\.global\.tile")


@assembles("cp.async.bulk.prefetch.tensor.")
def _prefetch(program: Program, op: ir.Operation, text: str) -> Step:
    """A hint: only its operands matter."""
    (statement,) = parse(text)
    match = _PREFETCH.fullmatch(statement.opcode)
    descriptor, *coordinates = program.inputs(op)
    if match is None or len(coordinates) != int(match[1]):
        raise NotModelled(f"llvm.inline_asm {text[:80]}")

    def prefetch(strand: Any) -> None:
        for _, issue in _issues(strand, descriptor, coordinates, descriptor):
            issue.tensor_map.check_start(issue.start, store=False)
            _in_gmem(issue)

    return prefetch


@assembles("prefetch.tensormap")
def _prefetch_map(program: Program, op: ir.Operation, text: str) -> Step:
    """Fetches a tensor map: it has to be one (PTX ISA, prefetch.tensormap)."""
    (statement,) = parse(text)
    found = statement.guard, statement.opcode, statement.operands
    if found != ("$0", "prefetch.tensormap", ("[$1]",)):
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    guard, address = program.inputs(op)

    def prefetch(strand: Any) -> None:
        wanted = strand.per_lane(strand.env[guard]).astype(bool) & strand.active()
        places = strand.per_lane(strand.env[address])
        for lane in map(int, np.flatnonzero(wanted)):
            described(strand, int(places[lane]), lane)

    return prefetch


# --- SMEM to GMEM ---------------------------------------------------------------------


class BulkGroups(Groups["StoreWork"]):
    """The bulk groups of one thread."""

    def wait(self, pending: int, read_only: bool) -> int:
        """Completes all but the newest groups; gives how many are complete then."""
        newer = self.groups
        older = self.take(pending)
        for work in itertools.chain(*older):
            work.read()
            if not read_only:
                work.complete()
        if read_only:
            self.groups = newer
        return max(self.committed - pending, 0)


@runs("nvvm.cp.async.bulk.tensor.global.shared.cta")
def _store(program: Program, op: ir.Operation) -> Step:
    descriptor, source, coordinates, policies, *rest = program.segments(op)
    _require_tiles(op, [])
    if any(rest):
        raise NotModelled(f"{op.name} with more operands")
    policy = policies[0] if policies else None
    return _issue_store(descriptor[0], source[0], coordinates, "", policy=policy)


def _issue_store(
    descriptor: int,
    source: int,
    coordinates: list[int],
    reduction: str,
    policy: int | None = None,
    of_rows: bool = False,
) -> Step:
    def store(strand: Any) -> None:
        check_policy(strand, policy)
        for _, issue in _issues(strand, descriptor, coordinates, source, of_rows):
            found = issue.tensor_map
            if reduction:
                reductions.check(reduction, found.dtype)
            found.check_start(issue.start, store=True)
            smem = found.in_smem(issue.address) - accesses.SMEM_BASE
            StoreWork(
                strand.cta, issue.row, issue.thread, smem, _in_gmem(issue),
                "a tensor copy", (reduction, found.dtype) if reduction else None,
            )  # fmt: skip

    return store


_SCATTER = "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"


@assembles(_SCATTER, first=True)
def _store_rows(program: Program, op: ir.Operation, text: str) -> Step:
    inputs = program.inputs(op)
    if text != f"{_SCATTER} [$0, {{$2, $3, $4, $5, $6}}], [$1];" or len(inputs) != 7:
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    descriptor, source, *coordinates = inputs
    return _issue_store(descriptor, source, coordinates, "", of_rows=True)


class StoreWork:
    """A copy to GMEM in the bulk group of a thread; it may combine elements.

    Args:
      smem: the bytes that it reads.
      target: the memory, the bytes in it, and to which of those read they correspond:
        what lies outside of a tensor is dropped.
      reduction: the operation and its element type.
    """

    def __init__(
        self,
        cta: Any,
        row: int,
        thread: int,
        smem: np.ndarray,
        target: tuple[Any, np.ndarray, Any],
        what: str,
        reduction: tuple[str, np.dtype] | None,
    ) -> None:
        self._cta, self._smem, self._reduction = cta, smem, reduction
        self._memory, self._places, self._inside = target
        rows = np.array([row])
        cta.smem.begin_read(rows, smem.reshape(-1), what)
        self._memory.check_visible(rows, self._places, f"{what} overwrites")
        self._data: np.ndarray | None = None
        self._done = False
        groups = cta.bulk.setdefault(thread, BulkGroups())
        self._agent, self._epoch = ("bulk", cta.name, thread), groups.committed + 1
        groups.open.append(self)

    def read(self) -> None:
        """Reads the SMEM."""
        if self._data is None:
            self._data = self._cta.smem.data[self._smem]
            agent = self._cta.clocks.agent(self._agent)
            self._cta.smem.end_read(self._smem.reshape(-1), agent, self._epoch)

    def complete(self) -> None:
        """Writes the GMEM."""
        if self._done:
            return
        self._done = True
        self.read()
        assert self._data is not None
        data = self._data[self._inside]
        if self._reduction is not None:
            operation, dtype = self._reduction
            old, new = (
                np.ascontiguousarray(x).view(dtype)
                for x in (self._memory.data[self._places], data)
            )
            result = np.ascontiguousarray(reductions.apply(operation, old, new))
            data = result.view(np.uint8).reshape(self._places.shape)
        self._memory.data[self._places] = data


@runs("nvvm.cp.async.bulk.commit.group")
def _commit(program: Program, op: ir.Operation) -> Step:
    def commit(strand: Any) -> None:
        for thread in strand.threads[strand.active()]:
            groups = strand.cta.bulk.get(int(thread))
            if groups is not None:
                groups.commit()

    return commit


@runs("nvvm.cp.async.bulk.wait_group")
def _wait_group(program: Program, op: ir.Operation) -> Step:
    pending = ir.IntegerAttr(op.attributes["group"]).value
    read_only = "read" in op.attributes

    def wait(strand: Any) -> None:
        if not strand.cta.bulk:
            return
        for lane in np.flatnonzero(strand.active()):
            thread = int(strand.threads[lane])
            groups = strand.cta.bulk.get(thread)
            if groups is None:
                continue
            done = groups.wait(pending, read_only)
            clocks = strand.cta.clocks
            agent = clocks.agent(("bulk", strand.cta.name, thread))
            clocks.learn(int(strand.row_of_lane[lane]), agent, done)

    return wait


def finish(cta: Any) -> None:
    """A block ends: copies must be done with its SMEM; those to GMEM get there."""
    if cta.smem.busy:
        raise PtxError(f"{cta.name} ends while asynchronous operations use its SMEM")
    for groups in cta.bulk.values():
        groups.wait(0, read_only=False)


_REDUCE = re.compile(
    r"cp\.reduce\.async\.bulk\.tensor\.(\d)d\.global\.shared::cta"
    rf"\.({'|'.join(reductions.TYPES)})"
    r"\.tile\.bulk_group(\.L2::cache_hint)?"
)


@assembles("cp.reduce.")
def _reduce(program: Program, op: ir.Operation, text: str) -> Step:
    _, match = form_of(text, _REDUCE)
    inputs = program.inputs(op)
    # `[map, {coordinates}]`, then the address in SMEM.
    numbers = [int(n) for n in re.findall(r"\$(\d+)", text)]
    policy = inputs[numbers.pop()] if match[3] else None
    descriptor, *coordinates, source = (inputs[n] for n in numbers)
    if len(coordinates) != int(match[1]):
        raise PtxError(f"{len(coordinates)} coordinates in {text}")
    return _issue_store(descriptor, source, coordinates, match[2], policy)
