# SPDX-License-Identifier: Apache-2.0
"""Values in registers. Layouts have no effect: a value is an array."""

from __future__ import annotations

from typing import Any

from pallas_gpu import errors
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.waits import Run, Wait
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


class _Registers:
    """The registers of a CTA, for a thread of each of its warpgroups.

    They are those with which it was launched, equally many for each: a warpgroup waits
    forever for more.

    Attributes:
      launched: of each warpgroup.
      requested: by those that have asked, with the line.
    """

    def __init__(self, cta: Cta):
        count = len(cta.warpgroups)
        each = _REGISTERS_PER_SM // (WARPGROUP_THREADS * count)
        self.launched = min(each // _UNIT * _UNIT, _MOST)
        self.held = [self.launched] * count
        self.requested: dict[int, tuple[int, str | None]] = {}

    @property
    def limit(self) -> int:
        """All of them."""
        return self.launched * len(self.held)

    def request(self, wg: Warpgroup, n: int, action: str) -> Run:
        """Sets the count of a warpgroup, which waits for what others release.

        Raises:
          KernelError: the action is in the other direction.
          OutOfResources: the warpgroups request more than there are.
        """
        before = self.held[wg.index]
        # The compiler may have launched with fewer than the limit.
        known = wg.index in self.requested or action == "decrease"
        if known and (n < before if action == "increase" else n > before):
            wrong = errors.KernelError(
                f"set_max_registers: {action!r} to {n}, and the warpgroup has {before}",
                expected="an increase to at least as many, or a decrease to at most as "
                "many",
                got=f"{before} to {n}",
                hint="swap the action",
            )
            report(wrong)
        self.requested[wg.index] = n, wg.where()
        others = [i for i in range(len(self.held)) if i != wg.index]
        if self._is_possible() and n > before:
            yield Wait(
                lambda: n + sum(self.held[i] for i in others) <= self.limit,
                f"{n} registers per thread",
                lambda: (
                    f"of {self.limit}, summed over the warpgroups, "
                    + ", ".join(f"warpgroup {i} holds {self.held[i]}" for i in others)
                ),
                hint="set_max_registers: let the others decrease their counts first, "
                "before they wait for this warpgroup",
            )
        self.held[wg.index] = n

    def _is_possible(self) -> bool:
        counts = sorted((i, n, line) for i, (n, line) in self.requested.items())
        silent = len(self.held) - len(counts)
        total = sum(n for _, n, _ in counts) + silent * _FEWEST
        if total <= self.limit:
            return True
        requests = (f"warpgroup {i}: {n}, at {line}" for i, n, line in counts)
        over = errors.OutOfResources(
            "set_max_registers: the warpgroups request more registers than the block "
            "has",
            resource="registers",
            limit_bytes=4 * WARPGROUP_THREADS * self.limit,
            used_bytes=4 * WARPGROUP_THREADS * total,
            expected=f"at most {self.limit} per thread, summed over the warpgroups: as "
            "many as the block has when it starts, equally many for each",
            got="\n".join([str(total), *requests]),
            hint="decrease the producer's count further, or increase the others' less",
        )
        report(over)
        return False


_OF_CTA: Key[Cta, _Registers] = Key("registers of warpgroups", _Registers)


@registry.register(registers.set_max_registers_p, registry.RuleKind.EMULATE)
def _set_max_registers(wg: Warpgroup, _: Any, n: int, action: str, used: Any) -> Run:
    return _OF_CTA.of(wg.cta).request(wg, n, action)
