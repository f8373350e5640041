# SPDX-License-Identifier: Apache-2.0
"""The reports of races."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine.ordering import (
    Access,
    Box,
    Clock,
    Earlier,
    Fence,
    box_text,
)

_COMMITS = {Fence.SMEM: "commit_smem()", Fence.GMEM: "commit_gmem()"}
_PTX = {
    Fence.SMEM: "fence.proxy.async.shared::cta",
    Fence.GMEM: "fence.proxy.async.global",
}

# Of two copies to the same elements, by whether these are in SMEM.
_OF_COPIES = {
    True: "; if others read what it brings, in any CTA, wait instead for a barrier on "
    "which each of them arrives when it has",
    False: "; or let each copy go to elements of its own",
}


def race(
    old: Access, new: Access, clock: Clock, name: str, box: Box, fence: Fence, hint: str
) -> errors.RaceError:
    """Returns the error for two accesses without an order.

    Args:
      old, new: the accesses.
      clock: of the thread that performs or issues the new one.
      name: the array.
      box: the first elements that both access.
      fence: what makes threads' stores to the array visible to asynchronous work.
      hint: what to do where no fence is missing, and no order of groups.
    """
    facts = {"buffer": name.rstrip(","), "elements": box, "other": old.place()}
    if old.known_to(clock):
        error, rule = _unfenced(old, new, name, fence), "missing-fence"
    elif old.viewer is not new.viewer:
        viewer: Any = old.viewer or new.viewer
        return viewer.race(old, new, name, [low for low, _ in box]).about(**facts)
    else:
        if (
            old.by_proxy
            and new.by_proxy
            and old.writes
            and new.writes
            and old.issue is None
        ):
            hint += _OF_COPIES[fence is Fence.SMEM]
        error = _unordered(old, new, name, hint)
        rule = "missing-wait" if _is_own_copy(old, new) else "race"
    return error.about(rule=rule, **facts)


def _is_own_copy(old: Access, new: Access) -> bool:
    """True for a copy for which this thread, or any, can wait: its order is missing."""
    return old.by_copy and (not old.generic or old.position is new.position)


def _unordered(old: Access, new: Access, name: str, hint: str) -> errors.RaceError:
    verb = "written" if new.writes else "read"
    if old.by_copy and not old.writes:
        what = f"{name} is {verb} while {old.what} may still read it"
    elif _is_own_copy(old, new):
        what = f"{name} is {verb} before {old.what} has been waited for"
    else:
        did = "written" if old.writes else "read"
        what = (
            f"{name} is {verb}, and {old.what} has {did} it without an order between "
            "them"
        )
    return errors.RaceError(
        what,
        expected=f"an order between this access and the one{at_line(old)}",
        got=f"{new.what} on elements {box_text(new.box)}; {old.what} on "
        f"{box_text(old.box)}",
        hint=hint,
    )


def too_early(
    earlier: Earlier, name: str, box: Box, who: str, writes: bool
) -> errors.RaceError:
    """Returns the error for an access without a wait for work before the run.

    Args:
      earlier: that work.
      name: the array.
      box: the elements.
      who: who accesses them.
      writes: whether it is a write.
    """
    return errors.RaceError(
        f"{name} is {'written' if writes else 'read'} before {earlier.what} has been "
        "waited for",
        expected=f"{earlier.wait} before this access, by the same thread or by one "
        "that it is ordered after",
        got=f"{who} on elements {box_text(box)}; {earlier.what} may still run",
        hint=earlier.hint,
    ).about(rule="early-launch", buffer=name, elements=box)


def at_line(access: Access) -> str:
    """Returns the line, if the author wrote it; pallas_call has copies of its own."""
    return f" at {access.where}" if access.where is not None else ""


def _unfenced(old: Access, new: Access, name: str, fence: Fence) -> errors.RaceError:
    verb = "overwrites" if new.writes else "reads"
    did, was = ("wrote", "written") if old.writes else ("read", "read")
    who, commit = "writer" if old.writes else "reader", _COMMITS[fence]
    return errors.RaceError(
        f"{new.what} {verb} {name.rstrip(',')}, {was}{at_line(old)} and not fenced",
        expected=f"{commit} between the two, by the {who}, or by another thread that "
        f"has waited for the {who}",
        got=f"{old.what} {did} elements {box_text(old.box)} without one",
        hint=f"call {commit}"
        + ("" if old.writes else f" ({_PTX[fence]}) before the arrival"),
    )


def schedule_dependent(
    name: str, first: np.ndarray, other: np.ndarray, schedule: Any, other_schedule: Any
) -> errors.RaceError | None:
    """Returns the error for a result that differs between two runs; None if none does.

    Args:
      name: the result.
      first, other: its contents.
      schedule, other_schedule: what repeats the runs, in words.
    """
    differs = _bits(first) != _bits(other)
    if not differs.any():
        return None
    at = [int(i) for i in np.unravel_index(int(np.argmax(differs)), differs.shape)]
    error = errors.RaceError(
        f"{name} depends on the schedule",
        expected="the same result in every order of threads and copies",
        got=f"element {at} is {first[*at]} with {schedule}, and {other[*at]} with "
        f"{other_schedule}",
        hint="order the accesses that determine it, with barriers and waits",
    )
    elements = tuple((i, i + 1) for i in at)
    return error.about(rule="schedule-dependent", buffer=name, elements=elements)


def _bits(x: np.ndarray) -> np.ndarray:
    """Returns values that are equal where all bits are; comparable also for NaN."""
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.dtype.itemsize}") if x.dtype.itemsize in (1, 2, 4, 8) else x
