# SPDX-License-Identifier: Apache-2.0
"""Profiled kernels: marks in their bodies, one more result, and who gets it.

A body is rewritten only where it is profiled, after it is traced: marks surround the
operations in each `jax.named_scope` that its author opened, and those that wait. A
scope without operations leaves no span, and neighbours of one name are one span. All
else follows from the marks: what the emulator records, and the code.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, timeline, types
from pallas_gpu.entry import call, trace
from pallas_gpu.entry.interpret import Observed
from pallas_gpu.primitives.warp import warp_map_p
from pallas_gpu.program.marks import marked
from pallas_gpu.program.walk import uses
from pallas_gpu.types.profiling.trace import SPAN_BYTES

# Room of a trace if nobody asks for another one; less where those of all CTAs would
# take more bytes than that.
_SPANS, _LEAST_SPANS, _MOST_BYTES = 512, 16, 1 << 26


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What `testing.profile` asks of all kernels that are called meanwhile.

    Attributes:
      deliver: gets the record of each launch.
      space: spans of a trace; None: up to 512.
      scope: who has a trace; None: warps in a kernel that uses `warp_map`.
      waits: whether waits are spans.
    """

    deliver: Callable[[timeline.Record], None]
    space: int | None = None
    scope: types.TraceScope | None = None
    waits: bool = True


# A part of JAX's cache keys: a function is traced again for each request.
REQUESTED = jax.make_user_context(None)


def bind(params: call.CallParams, operands: Sequence[Any]) -> list[Any]:
    """Binds the kernel primitive, of a profiled kernel if someone asks for that."""
    options, request = params.compiler_params, REQUESTED.value
    # A check of a kernel runs it as it is.
    if isinstance(params.interpret, Observed) or not isinstance(
        params.mesh, types.Mesh
    ):
        request = None
    elif request is None and options.profile_space:
        request = Request(
            functools.partial(timeline.write_file, options.profile_dir),
            options.profile_space,
            options.profile_trace_scope,
            options.profile_waits,
        )
    if request is None:
        return call.kernel_p.bind(*operands, **params.as_dict())
    return _bind_profiled(params, operands, request)


def _bind_profiled(
    params: call.CallParams, operands: Sequence[Any], request: Request
) -> list[Any]:
    recording = _recording(params, request)
    mesh, n_in, n_out = params.mesh, params.num_inputs, len(params.out_avals)
    shape = (mesh.blocks, recording.traces(mesh.warpgroups), recording.words)
    aval = _jax.ShapedArray(shape, jnp.dtype(jnp.uint32))
    ref = trace.gmem(aval)
    jaxpr, names = marked(params.jaxpr, n_in, ref, recording, request.waits)
    interpret = params.interpret
    if isinstance(interpret, types.InterpretParams):
        # Another schedule records other events.
        interpret = dataclasses.replace(interpret, schedules=1)
    profiled = dataclasses.replace(
        params,
        jaxpr=jaxpr,
        out_avals=(*params.out_avals, aval),
        aliases=(*params.aliases, (n_in, n_out)),
        interpret=interpret,
    )
    # Of a CTA that never runs, as under dynamic scheduling, all words remain zero.
    given = _jax.vary_alike([*operands, jnp.zeros(aval.shape, aval.dtype)])
    *results, traces = call.kernel_p.bind(*given, **profiled.as_dict())
    described = functools.partial(
        timeline.Described,
        params.name,
        recording=recording,
        grid=(*mesh.grid, *mesh.cluster),
        thread_name=mesh.thread_name,
        is_modelled=isinstance(interpret, types.InterpretParams),
    )

    def deliver(words: Any) -> None:
        # Inline code has named its spans since this was traced.
        request.deliver(timeline.Record(described(names.known()), words))

    jax.debug.callback(deliver, traces)
    return results


def _recording(params: call.CallParams, request: Request) -> types.Recording:
    """Returns how a kernel records."""
    scope = request.scope
    if scope is None:
        in_warps = uses(params.jaxpr, warp_map_p)
        scope = types.TraceScope.WARP if in_warps else types.TraceScope.WARPGROUP
    if request.space is not None:
        return types.Recording(request.space, scope)
    traces = params.mesh.blocks * types.Recording(1, scope).traces(
        params.mesh.warpgroups
    )
    room = _MOST_BYTES // (traces * SPAN_BYTES)
    return types.Recording(max(_LEAST_SPANS, min(_SPANS, room)), scope)
