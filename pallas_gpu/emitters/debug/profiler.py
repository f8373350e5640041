# SPDX-License-Identifier: Apache-2.0
"""Events of a profiled kernel, which are stored to GMEM as they happen."""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu import types
from pallas_gpu.emitters import module, operations
from pallas_gpu.emitters.control import predicated
from pallas_gpu.types.profiling import trace

_MARK = "{ .reg .b32 now; mov.u32 now, %clock; @$2 st.global.v2.b32 [$0], {$1, now}; }"


class Recorder:
    """The traces that the warpgroups or warps of a CTA record, each its own.

    One thread of each reads the clock and stores the events. `%clock` counts the cycles
    of the SM, which its warps share: it is exact to one, where `%globaltimer` advances
    in larger steps. Its 32 bits wrap every few seconds: events of a trace are in order,
    so that differences remain right. The header has both, by which the host finds the
    time of the device, which all SMs share.

    How many events there were is a variable of each thread, which LLVM keeps in a
    register, also through loops.

    Args:
      recording: how the traces are recorded.
      traces: `!llvm.ptr`, the words of the traces of all CTAs in GMEM.
      cta: i32, the number of the CTA in the launch.
      names: of the spans; those that begin here are added.
    """

    def __init__(
        self,
        recording: types.Recording,
        traces: ir.Value,
        cta: ir.Value,
        names: types.SpanNames,
    ):
        kernel = module.current()
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        threads = kernel.threads
        self._recording, self._names = recording, names
        self._is_warp = recording.scope is types.TraceScope.WARP
        self._elected = threads.elected
        number = threads.warpgroup
        if self._is_warp:
            self._elected = threads.warp_elected
            number = arith.addi(arith.muli(number, kernel.i32(4)), threads.warp)
        count = recording.traces(kernel.spec.warpgroups)
        row = arith.addi(arith.muli(cta, kernel.i32(count)), number)
        distance = arith.constant(i64, 4 * recording.words)
        self._row = operations.offset(
            traces, arith.muli(arith.extui(i64, row), distance)
        )
        self._events = operations.offset(self._row, 4 * trace.HEADER_WORDS)
        self._count = llvm.alloca(module.pointer_type(), kernel.i32(1), i32)
        llvm.store(kernel.i32(0), self._count)
        with predicated(self._elected):
            self._store_clocks(trace.FIRST_TIME, trace.FIRST_CLOCK)

    def begin(self, name: str) -> None:
        """Records that a span begins. The issuer is that of the code."""
        self.mark(self._names.number(name))

    def end(self, name: str) -> None:
        """Records that the innermost span ends, which has this name."""
        self.mark(self._names.number(name) | trace.END)

    def mark(self, tag: int) -> None:
        """Records an event, or only counts it if there is no room.

        PTX: `mov.u32` of `%clock`, `st.global.v2.b32`.

        Args:
          tag: see `types.profiling.trace`.
        """
        kernel = module.current()
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        count = llvm.load(i32, self._count)
        has_room = arith.cmpi(
            arith.CmpIPredicate.ult, count, kernel.i32(self._recording.events)
        )
        offset = arith.muli(count, kernel.i32(trace.EVENT_BYTES))
        signed = tag - 2**32 if tag >= 2**31 else tag
        address = operations.offset(self._events, offset)
        llvm.inline_asm(
            None,
            [
                llvm.ptrtoint(i64, address),
                kernel.i32(signed),
                arith.andi(has_room, self._elected),
            ],
            _MARK,
            "l,r,b,~{memory}",
            has_side_effects=True,
        )
        llvm.store(arith.addi(count, kernel.i32(1)), self._count)

    def stop(self) -> None:
        """Stores what the host needs besides. Behind the last event of each warp."""
        kernel = module.current()
        count = llvm.load(ir.IntegerType.get_signless(32), self._count)
        with predicated(self._elected):
            self._store_clocks(trace.LAST_TIME, trace.LAST_CLOCK)
            self._store(_special("smid", 32), trace.SM)
            self._store(count, trace.COUNT)
            self._store(kernel.i32(trace.CYCLES), trace.UNIT)

    def _store_clocks(self, time: int, clock: int) -> None:
        self._store(_special("globaltimer", 64), time)
        self._store(_special("clock64", 64), clock)

    def _store(self, value: ir.Value, word: int) -> None:
        llvm.store(value, operations.offset(self._row, 4 * word))


def _special(name: str, bits: int) -> ir.Value:
    """The value of a special register, which differs each time that it is read."""
    return llvm.inline_asm(
        ir.IntegerType.get_signless(bits),
        [],
        f"mov.u{bits} $0, %{name};",
        "=r,~{memory}" if bits == 32 else "=l,~{memory}",
        has_side_effects=True,
    )
