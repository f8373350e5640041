# SPDX-License-Identifier: Apache-2.0
"""The marks of a profiled kernel: where a span begins or ends, and around its body.

No author writes them: `entry/profiling.py` inserts them.
"""

from __future__ import annotations

from typing import Any

from pallas_gpu import types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry

profile_start_p = registry.define("profile_start", "profiler", writes=("traces",))
profile_mark_p = registry.define("profile_mark", "profiler")
profile_stop_p = registry.define("profile_stop", "profiler", writes=("traces",))


def start(traces: Any, recording: types.Recording, names: types.SpanNames) -> None:
    """Begins the trace of the issuer.

    Args:
      traces: uint32 [CTAs, traces of a CTA, words] in GMEM.
      recording: how they are recorded.
    """
    ops.bind(profile_start_p, {"traces": traces}, recording=recording, names=names)


def mark(tag: int, recording: types.Recording) -> None:
    """Records an event, if there is room.

    Args:
      tag: see `types.profiling.trace`.
      recording: as of `start`.
    """
    ops.bind(profile_mark_p, {}, tag=tag, recording=recording)


def stop(traces: Any, recording: types.Recording) -> None:
    """Ends the trace of the issuer, and stores it.

    Args:
      traces, recording: as of `start`.
    """
    ops.bind(profile_stop_p, {"traces": traces}, recording=recording)
