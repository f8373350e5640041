# SPDX-License-Identifier: Apache-2.0
"""Values in registers. Layouts have no effect: a value is an array."""

from __future__ import annotations

from typing import Any

from pallas_gpu import errors
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.gpu.machine.cta import Cta, Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import registers
from pallas_gpu.types.mesh import WARPGROUP_THREADS


@registry.register(registers.load_p, registry.RuleKind.EMULATE)
def _load(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> Any:
    return wg.read(operands["src"])


@registry.register(registers.store_p, registry.RuleKind.EMULATE)
def _store(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> None:
    wg.write(operands["dst"], operands["value"])


@registry.register(registers.layout_cast_p, registry.RuleKind.EMULATE)
def _layout_cast(x: Any, **_: Any) -> Any:
    return x


@registry.register(registers.multiple_of_p, registry.RuleKind.EMULATE)
def _multiple_of(x: Any, divisor: int, *, tree: Any = None, **what: str) -> Any:
    registers.require_multiple(int(x), divisor, **what)
    return x


# CUDA C++ programming guide, compute capability 9.0: 64 Ki 32-bit registers per SM.
_REGISTERS_PER_SM = 65536
# PTX ISA, setmaxnreg: the smallest count; counts are multiples of 8.
_FEWEST, _UNIT = 24, 8
# Those of a thread have numbers of 8 bits.
_MOST = 256


# The requested counts, by warpgroup.
_COUNTS: Key[Cta, dict[int, int]] = Key("registers of warpgroups", lambda cta: {})


@registry.register(registers.set_max_registers_p, registry.RuleKind.EMULATE)
def _set_max_registers(wg: Warpgroup, _: Any, n: int, action: str, used: Any) -> None:
    counts = _COUNTS.of(wg.cta)
    before = counts.get(wg.index)
    if before is not None and (n < before if action == "increase" else n > before):
        error = errors.KernelError(
            f"set_max_registers: {action!r} to {n}, and the warpgroup has {before}",
            expected="an increase to at least as many, or a decrease to at most as "
            "many",
            got=f"{before} to {n}",
            hint="swap the action",
        )
        report(error)
    counts[wg.index] = n
    others = len(wg.cta.warpgroups) - len(counts)
    total = sum(counts.values()) + others * _FEWEST
    limit = _launched(len(wg.cta.warpgroups))
    if total <= limit:
        return
    held = ", ".join(f"warpgroup {i}: {count}" for i, count in sorted(counts.items()))
    over = errors.OutOfResources(
        "set_max_registers: the warpgroups request more registers than the block has",
        resource="registers",
        limit_bytes=4 * WARPGROUP_THREADS * limit,
        used_bytes=4 * WARPGROUP_THREADS * total,
        expected=f"at most {limit} per thread, summed over the warpgroups: as many as "
        "the block has when it starts, equally many for each",
        got=f"{total} ({held})",
        hint="decrease the producer's count further, or increase the others' less",
    )
    report(over)


def _launched(warpgroups: int) -> int:
    """Returns the registers of a block, for a thread of each of its warpgroups.

    A warpgroup waits forever for those that the block did not have when it started.
    """
    each = _REGISTERS_PER_SM // (WARPGROUP_THREADS * warpgroups)
    return min(each // _UNIT * _UNIT, _MOST) * warpgroups
