# SPDX-License-Identifier: Apache-2.0
"""SparseCores and their subcores, which are threads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

from pallas_gpu import errors, types
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import Execution
from pallas_gpu.emulator.engine.orders.choices import Kind, Touch
from pallas_gpu.emulator.engine.tables import State
from pallas_gpu.emulator.engine.threads import Group, Thread
from pallas_gpu.emulator.engine.waits import Run, Wait
from pallas_gpu.sparsecore.types import SEMAPHORES, SMEM


class Allocated(Protocol):
    """Memory or semaphores that a subcore has allocated."""

    declared: Declared


@dataclasses.dataclass(frozen=True, eq=False)
class Declared:
    """A declaration of a scope.

    Attributes:
      place: identifies it in all runs, and for all subcores.
      aval: the type of its reference.
      name: by which the author knows it; may be empty.
      make: makes what a subcore gets for it.
    """

    place: Hashable
    aval: Any
    name: str
    make: Callable[[Declared, Subcore], Allocated]

    @property
    def is_shared(self) -> bool:
        """Whether all subcores of a core have one."""
        return getattr(self.aval.memory_space, "shared", False)

    @property
    def is_reachable(self) -> bool:
        """Whether other subcores can access what one has."""
        return self.aval.memory_space in (SMEM, SEMAPHORES)


class Device:
    """The SparseCores of one run.

    Attributes:
      execution: the run.
      zeros: whether fresh memory contains zeros instead of poison.
      like_upstream: whether unfinished copies and semaphores are accepted at the end.
      pending: the copies in flight, of all cores.
    """

    def __init__(self, execution: Execution, params: types.InterpretParams):
        self.execution = execution
        self.zeros = params.uninitialized_memory == "zero"
        self.like_upstream = params.like_upstream
        self.cores: list[Core] = []
        self.pending: dict[Any, None] = {}


class Core(Group):
    """One SparseCore: its vector subcores, its scalar subcore, or both.

    Attributes:
      index: its number.
      subcores: the vector subcores.
      shared: what all subcores of the core share, by the place of its declaration.
      barrier: of the vector subcores.
      state: state of families.
    """

    def __init__(self, device: Device, index: int):
        super().__init__(device.execution)
        self.device = device
        self.index = index
        self.shared: dict[Hashable, Allocated] = {}
        self.subcores: list[Subcore] = []
        self.state: State = {}
        device.cores.append(self)

    def add(self, axes: Mapping[str, int], subcore: int | None) -> Subcore:
        """Returns a new subcore, the scalar one without a number."""
        thread = Subcore(self, axes, subcore)
        self.threads.append(thread)
        if subcore is not None:
            self.subcores.append(thread)
        return thread

    @functools.cached_property
    def barrier(self) -> Barrier:
        """The barrier of its vector subcores."""
        return Barrier(self)

    @property
    def suffix(self) -> str:
        """Distinguishes it from other cores in messages."""
        return f" of core {self.index}" if len(self.device.cores) > 1 else ""

    def dissolve(self) -> None:
        """Keeps what others may still reach until the launch has ended."""

    def release(self) -> None:
        """Drops what refers to the core; see `Group.dissolve`."""
        self.state.clear()
        self.shared.clear()
        for thread in self.threads:
            assert isinstance(thread, Subcore)
            thread.own.clear()
        self.subcores.clear()
        super().dissolve()


class Subcore(Thread):
    """One subcore.

    Attributes:
      index: its number among the vector subcores; None for the scalar one.
      own: its memory and semaphores, by the place of their declaration.
      iteration_name: of the iteration of a parallel loop that it runs.
    """

    kind = "subcore"

    def __init__(self, core: Core, axes: Mapping[str, int], index: int | None):
        super().__init__(core, alone=False)
        self.core = core
        self.index = index
        self.own: dict[Hashable, Allocated] = {}
        self.iteration_name = ""
        self._axes = axes
        own = {} if index is None else {"subcore": index}
        self.position = {"core": core.index} | own

    @functools.cached_property
    def name(self) -> str:  # type: ignore[override]
        """The position, for messages."""
        own = "the scalar subcore" if self.index is None else f"subcore {self.index}"
        return own + self.core.suffix

    @property
    def name_in_group(self) -> str:
        """The position, for messages."""
        return self.name

    @property
    def label(self) -> str:
        """The position, for messages."""
        return self.iteration_name + self.name

    @property
    def order_hint(self) -> str:  # type: ignore[override]
        """How another thread comes to access what this one has accessed."""
        if self.iteration_name:
            return (
                "iterations of a parallel_loop run in any order and overlap: let each "
                "access elements of its own, or use plsc.loop"
            )
        return (
            "call plsc.subcore_barrier() between the two accesses, behind the wait for "
            "a copy; between cores, signal and wait for a semaphore"
        )

    def allocated(self, declared: Declared) -> Any:
        """Returns what it gets for a declaration; the first call allocates it."""
        owned = self.core.shared if declared.is_shared else self.own
        found = owned.get(declared.place)
        if found is None:
            found = owned[declared.place] = declared.make(declared, self)
        return found

    def free(self, declared: Declared, lasts: bool) -> None:
        """Frees what a declaration has allocated.

        Memory that others share exists until they end.

        Args:
          declared: the declaration.
          lasts: whether what others can reach exists as long as the kernel.
        """
        if not (lasts and declared.is_reachable):
            self.own.pop(declared.place, None)

    def of_other(self, found: Any, core: Any, subcore: Any) -> Any:
        """Returns what another subcore has for the same declaration.

        Args:
          core, subcore: numbers; None: those of this one.
        """
        at = (
            self.core.index if core is None else int(core),
            self.index if subcore is None else int(subcore),
        )
        for other in (t for c in self.core.device.cores for t in c.threads):
            assert isinstance(other, Subcore)
            if (other.core.index, other.index) == at:
                return other.allocated(found.declared)
        raise errors.OutOfBoundsError(
            f"{found.name} of a subcore on which the kernel does not run",
            expected="the numbers of a core and a subcore of the mesh",
            got=f"core {at[0]}, subcore {at[1]}",
            hint="compute them modulo the sizes of the axes",
        )

    def _advice(self, old: ordering.Access) -> str:
        """Returns what to do about an access that conflicts with one of this thread."""
        return old.hint if old.position is self.position else self.order_hint

    _advice_to_read = _advice

    def must_record(self, memory: Any, writes: bool) -> bool:
        """Returns whether a later access may conflict with one of this thread.

        Memory of its own is accessed in order, also by the copies that it starts, but
        for iterations of a parallel loop.
        """
        return bool(self.iteration_name) or not memory.private

    def axis_index(self, name: str) -> int:
        """Returns the position on a named axis."""
        if name not in self._axes:
            raise errors.AxisNameError(
                f"no axis is named {name!r}", expected=[*self._axes], got=name
            )
        return self._axes[name]


class Barrier:
    """Where all vector subcores of a core wait for each other."""

    def __init__(self, core: Core):
        self._core = core
        self._phase = 0
        self._arrived = 0
        self._arriving: ordering.Clock = {}
        self._known: ordering.Clock = {}

    def wait(self, thread: Subcore) -> Run:
        """Arrives, and waits for all others."""
        phase, execution = self._phase, thread.execution
        place, count = ("barrier", self._core.index), len(self._core.subcores)
        self._arrived += 1
        last = self._arrived == count
        execution.touch(Touch(place, Kind.ADD, epoch=phase, closes=last))
        ordering.join(self._arriving, thread.release())
        if last:
            self._phase, self._arrived = phase + 1, 0
            self._known, self._arriving = self._arriving, {}
        else:
            yield Wait(
                lambda: self._phase > phase,
                "all subcores of its core to reach subcore_barrier",
                lambda: f"{self._arrived} of {count} subcores have reached it",
                hint="let all subcores of a core call subcore_barrier equally often, "
                "outside of branches that not all of them take",
                barrier="subcore_barrier",
            )
        execution.touch(Touch(place, Kind.AWAIT, epoch=phase))
        # The next phase cannot be complete: it needs this thread.
        ordering.join(thread.clock, self._known)
