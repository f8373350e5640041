# SPDX-License-Identifier: Apache-2.0
"""The reports of races between CTAs, and between devices."""

from __future__ import annotations

import dataclasses

from pallas_gpu import errors
from pallas_gpu.emulator.engine.ordering import Access, Viewer, box_text
from pallas_gpu.emulator.engine.race_report import at_line

_RULE = "race-between-ctas"


@dataclasses.dataclass(frozen=True, eq=False)
class ClusterViewer(Viewer):
    """The CTAs of a cluster as users of global memory."""

    def race(
        self, old: Access, new: Access, name: str, element: list[int]
    ) -> errors.RaceError:
        """Returns the error for two accesses of different clusters or devices."""
        differ = old.position.get("device") != new.position.get("device")
        between = _between_devices if differ else _between_ctas
        return between(old, new, name, element).about(rule=_RULE)


def _between_ctas(
    old: Access, new: Access, name: str, element: list[int]
) -> errors.RaceError:
    did, does = ("written" if a.writes else "read" for a in (old, new))
    who, by = (a.viewer.name if a.viewer else a.what for a in (old, new))
    return errors.RaceError(
        f"{name} is {does} by one CTA and {did} by another",
        expected="each element of a result to be accessed by one CTA, or an order "
        "between the accesses: CTAs run in any order, also at the same time",
        got=f"element {element}, {did} by {who}{at_line(old)} and {does} by {by}",
        hint="let each CTA write a separate part of the result, or call "
        "semaphore_signal after the first access and semaphore_wait before the second; "
        'relaxed atomic operations order no other accesses, those with sem="release" '
        'after the first and sem="acquire" before the second do',
    )


def _between_devices(
    old: Access, new: Access, name: str, element: list[int]
) -> errors.RaceError:
    did, does = ("written" if a.writes else "read" for a in (old, new))
    who, by = (
        f"{a.what} of {a.viewer.name}" if a.viewer else a.what for a in (old, new)
    )
    return errors.RaceError(
        f"{name} is {does} by one device and {did} by another",
        expected="an order between the two accesses: devices run at the same time, "
        "each at its own speed",
        got=f"element {element}, {did} by {who}{at_line(old)} and {does} by {by}",
        hint=_WIDER_SCOPE if old.atomic and new.atomic else _signal_after(old),
    )


_WIDER_SCOPE = (
    'pass scope="sys" to both: at gpu scope, the default of operations on the own '
    "memory, an operation is atomic with those of the same device alone"
)


def _signal_after(old: Access) -> str:
    first = f"{old.hint}, then " if old.by_copy else ""
    return (
        f"{first}let the device of the first access call semaphore_signal(..., "
        "device_id=...) after it, and the other one semaphore_wait before the second, "
        'both with memory_scope="sys"'
    )


def after_the_end(old: Access, name: str, suffix: str) -> errors.RaceError:
    """Returns the error for an access that may come after the end of a kernel.

    Args:
      old: the access, by a thread of another device.
      name: the array.
      suffix: of the device that has the array.
    """
    who = f"{old.what} of {old.viewer.name}" if old.viewer else old.what
    error = errors.RaceError(
        f"{name} may be {'written' if old.writes else 'read'} by another device after "
        "the kernel has ended on its own",
        expected=f"a wait{suffix.replace(' of ', ' on ', 1)}, before the kernel ends, "
        "for what the other device does after the access",
        got=f"{who} on elements {box_text(old.box)}",
        hint=_signal_after(old),
        where=old.where,
    )
    return error.about(rule=_RULE, buffer=name, elements=old.box)
