# SPDX-License-Identifier: Apache-2.0
"""The resources of a compiled kernel: ptxas's registers and spills, the planner's SMEM.

ptxas does not report dynamic SMEM, mbarriers and TMEM, so the caller, which has planned
them, passes those figures.
"""

from __future__ import annotations

import dataclasses
import re

from pallas_gpu import arch, errors

# Allocation units of the CUDA occupancy calculator, compute capability 9.0 and 10.0.
_REGISTER_UNIT_PER_THREAD = 8
_WARP_UNIT = 4
_SMEM_UNIT_BYTES = 128
_RESERVED_SMEM_BYTES_PER_BLOCK = 1024
_MAX_BLOCKS_PER_SM = 32
_THREADS_PER_WARP = 32

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for '?([^'\s]+)'?")
_FRAME = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (\d+) registers")
_CUMULATIVE_STACK = re.compile(r"(\d+) bytes cumulative stack size")
_REMARK = re.compile(r"ptxas (?:warning|info)\s*:\s*(.*)")


@dataclasses.dataclass(frozen=True)
class PtxasReport:
    """ptxas's report about one kernel.

    Attributes:
      registers_per_thread: registers per thread at launch.
      spill_store_bytes: bytes that a thread spills to local memory.
      spill_load_bytes: bytes that it reloads.
      stack_bytes: local memory per thread, spills included.
      remarks: warnings, and notes on lost performance such as serialized wgmma.
    """

    registers_per_thread: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    remarks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources(PtxasReport):
    """The resources of one kernel on one target. `str()` returns a short table.

    Attributes:
      registers_per_thread, spill_store_bytes, spill_load_bytes, stack_bytes, remarks:
        as in ptxas's report.
      target: the target's name.
      register_limit: maximum of registers per thread for this block size.
      smem_bytes: dynamic SMEM per block.
      smem_limit_bytes: maximum of SMEM per block.
      num_barriers: mbarriers per block.
      tmem_columns: TMEM columns per block.
      threads_per_block: threads per block.
      occupancy_blocks_per_sm: number of resident blocks per SM; 0 if none fits.
    """

    target: str
    register_limit: int
    smem_bytes: int
    smem_limit_bytes: int
    num_barriers: int
    tmem_columns: int
    threads_per_block: int
    occupancy_blocks_per_sm: int

    def __str__(self) -> str:
        spills = (
            f"{self.spill_store_bytes} B stored, {self.spill_load_bytes} B loaded"
            if self.spill_store_bytes or self.spill_load_bytes
            else "none"
        )
        rows = [
            ("target", self.target),
            ("threads per block", str(self.threads_per_block)),
            (
                "registers per thread",
                f"{self.registers_per_thread} of {self.register_limit}",
            ),
            ("spills per thread", spills),
            ("stack per thread", f"{self.stack_bytes} B"),
            ("SMEM", f"{self.smem_bytes} of {self.smem_limit_bytes} B"),
            ("mbarriers", str(self.num_barriers)),
            ("TMEM columns", str(self.tmem_columns)),
            ("blocks per SM", str(self.occupancy_blocks_per_sm)),
        ]
        rows += [("ptxas", remark) for remark in self.remarks]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def parse_ptxas(report: str) -> PtxasReport:
    """Parses ptxas's report (`-v`) of a module with one kernel.

    Raises:
      InternalError: the report lacks the kernel or its registers.
    """
    entry = _ENTRY.search(report)
    registers = _REGISTERS.search(report)
    if entry is None or registers is None:
        raise errors.InternalError(
            "ptxas's report cannot be parsed",
            expected="'Compiling entry function' and 'Used N registers'",
            got=report[:500] or "nothing",
        )
    frames: dict[str, tuple[int, int, int]] = {}
    function = entry[1]
    for line in report.splitlines():
        if name := _PROPERTIES.search(line):
            function = name[1]
        elif frame := _FRAME.search(line):
            stack, stores, loads = (int(n) for n in frame.groups())
            frames[function] = (stack, stores, loads)
    cumulative = _CUMULATIVE_STACK.search(report)
    own_stack = frames.get(entry[1], (0, 0, 0))[0]
    return PtxasReport(
        registers_per_thread=int(registers[1]),
        spill_store_bytes=sum(stores for _, stores, _ in frames.values()),
        spill_load_bytes=sum(loads for _, _, loads in frames.values()),
        stack_bytes=max(own_stack, int(cumulative[1]) if cumulative else 0),
        remarks=_remarks(report),
    )


def register_limit(target: str | arch.GpuTarget, threads_per_block: int) -> int:
    """The maximum of registers per thread in a block of this many threads."""
    target = arch.target(target)
    share = target.registers_per_sm // max(threads_per_block, 1)
    whole_units = share // _REGISTER_UNIT_PER_THREAD * _REGISTER_UNIT_PER_THREAD
    return min(target.max_registers_per_thread, whole_units)


def occupancy_blocks_per_sm(
    target: str | arch.GpuTarget,
    *,
    threads_per_block: int,
    registers_per_thread: int,
    smem_bytes: int = 0,
    tmem_columns: int = 0,
) -> int:
    """The number of resident blocks per SM, as in CUDA's occupancy calculator."""
    limits = occupancy_limits(
        target,
        threads_per_block=threads_per_block,
        registers_per_thread=registers_per_thread,
        smem_bytes=smem_bytes,
        tmem_columns=tmem_columns,
    )
    return min(limits.values())


def occupancy_limits(
    target: str | arch.GpuTarget,
    *,
    threads_per_block: int,
    registers_per_thread: int,
    smem_bytes: int = 0,
    tmem_columns: int = 0,
) -> dict[str, int]:
    """The number of blocks per SM that each resource of the SM admits.

    The allocation of TMEM blocks until another block has released it, so TMEM bounds
    the number of blocks that make progress.
    """
    target = arch.target(target)
    warps = _round_up(-(-threads_per_block // _THREADS_PER_WARP), _WARP_UNIT)
    threads = warps * _THREADS_PER_WARP
    registers = _round_up(max(registers_per_thread, 1), _REGISTER_UNIT_PER_THREAD)
    smem = _round_up(smem_bytes, _SMEM_UNIT_BYTES) + _RESERVED_SMEM_BYTES_PER_BLOCK
    limits = {
        "blocks": _MAX_BLOCKS_PER_SM,
        "threads": target.max_threads_per_sm // threads,
        "registers": target.registers_per_sm // (registers * threads),
        "SMEM": target.smem_bytes_per_sm // smem,
    }
    if tmem_columns:
        limits["TMEM"] = target.tmem_columns // tmem_columns
    return limits


def resources(
    ptxas: str,
    *,
    target: str | arch.GpuTarget,
    threads: int,
    smem_bytes: int,
    num_barriers: int,
    tmem_columns: int = 0,
) -> Resources:
    """Combines ptxas's report and the planner's figures.

    Args:
      ptxas: ptxas's report.
      target: the target of the compilation.
      threads: threads per block.
      smem_bytes: dynamic SMEM per block.
      num_barriers: mbarriers per block.
      tmem_columns: TMEM columns per block.
    """
    target = arch.target(target)
    report = parse_ptxas(ptxas)
    return Resources(
        **vars(report),
        target=target.name,
        register_limit=register_limit(target, threads),
        smem_bytes=smem_bytes,
        smem_limit_bytes=target.smem_bytes_per_block,
        num_barriers=num_barriers,
        tmem_columns=tmem_columns,
        threads_per_block=threads,
        occupancy_blocks_per_sm=occupancy_blocks_per_sm(
            target,
            threads_per_block=threads,
            registers_per_thread=report.registers_per_thread,
            smem_bytes=smem_bytes,
            tmem_columns=tmem_columns,
        ),
    )


def _remarks(report: str) -> tuple[str, ...]:
    """Warnings, and notes on lost performance, without duplicates."""
    found = []
    for line in report.splitlines():
        match = _REMARK.match(line)
        if match and ("warning" in line or "Performance Loss" in line):
            found.append(match[1])
    return tuple(dict.fromkeys(found))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
