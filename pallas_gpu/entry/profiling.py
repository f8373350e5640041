# SPDX-License-Identifier: Apache-2.0
"""Profiled kernels: marks in their bodies, one more result, and who gets it.

A body is rewritten only where it is profiled, after it is traced: marks surround the
operations in each `jax.named_scope` that its author opened, and those that wait. A
scope without operations leaves no span, and neighbours of one name are one span. All
else follows from the marks: SMEM in the plan, what the emulator records, the code.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, resources, timeline, types
from pallas_gpu.entry import assumed_target, call, expand, trace
from pallas_gpu.entry.interpret import Observed
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import profiler
from pallas_gpu.primitives.scoped import run_scoped_p
from pallas_gpu.primitives.warp import warp_map_p
from pallas_gpu.program.bodies import kept
from pallas_gpu.program.rewrite import Rewrite
from pallas_gpu.program.walk import Site, uses, walk
from pallas_gpu.types import profiling

# The operations that wait, apart from those on barriers and semaphores, which have the
# names of these.
_WAITS = (
    "barrier_wait",
    "cluster_sync",
    "griddepcontrol_wait",
    "semaphore_wait",
    "wait_gmem_to_smem",
    "wait_load_tmem",
    "wait_smem_to_gmem",
    "wgmma_wait",
)
_SPANS = 512


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What `testing.profile` asks of all kernels that are called meanwhile.

    Attributes:
      deliver: gets the record of each launch.
      space: spans of a trace, recorded in SMEM; None: 512, in SMEM if it has room.
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
    if isinstance(params.interpret, Observed):
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
    jaxpr, names = _marked(params.jaxpr, n_in, mesh, recording, request.waits)
    interpret = params.interpret
    if isinstance(interpret, types.InterpretParams):
        # Another schedule records other events.
        interpret = dataclasses.replace(interpret, schedules=1)
    aval = _traces(mesh, recording)
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
    described = timeline.Described(
        params.name,
        names,
        recording,
        (*mesh.grid, *mesh.cluster),
        mesh.thread_name,
        is_modelled=isinstance(interpret, types.InterpretParams),
    )
    deliver = request.deliver
    jax.debug.callback(lambda x: deliver(timeline.Record(described, x)), traces)
    return results


def _traces(mesh: types.Mesh, recording: types.Recording) -> _jax.ShapedArray:
    shape = (mesh.blocks, recording.traces(mesh.warpgroups), recording.words)
    return _jax.ShapedArray(shape, jnp.dtype(jnp.uint32))


def _recording(params: call.CallParams, request: Request) -> types.Recording:
    """Returns how a kernel records."""
    scope = request.scope
    if scope is None:
        in_warps = uses(params.jaxpr, warp_map_p)
        scope = types.TraceScope.WARP if in_warps else types.TraceScope.WARPGROUP
    if request.space is not None:
        return types.Recording(request.space, scope)
    options, mesh = params.compiler_params, params.mesh
    target = assumed_target.target_of(options.target)
    plan = resources.plan(
        expand.expanded_body(params.jaxpr, mesh, target, options.lowering_semantics),
        target,
        params.name,
        options.reduction_scratch_bytes,
        mesh.warpgroups,
    )
    free = plan.scratch_free_bytes - plan.scratch_room_bytes
    recording = types.Recording(_SPANS, scope)
    in_smem = recording.smem_bytes(mesh.warpgroups) <= free
    return dataclasses.replace(recording, in_smem=in_smem)


# --- the marks ------------------------------------------------------------------------

Names = tuple[tuple[str, bool], ...]  # of spans, and whether each is a wait


@kept
def _marked(
    jaxpr: _jax.Jaxpr,
    inputs: int,
    mesh: types.Mesh,
    recording: types.Recording,
    waits: bool,
) -> tuple[_jax.Jaxpr, Names]:
    """Returns a body with marks, and the names of its spans.

    Its last input and its last result are the traces.
    """
    waiting = dict(_waits(jaxpr)) if waits else {}
    marks = _Marks(recording, waiting)
    body = marks.body(jaxpr)
    aval = _traces(mesh, recording)
    ref = trace.gmem_ref(aval.shape, aval.dtype)

    def around(before: Any, after: Any) -> None:
        del before  # what the traces are initially
        profiler.start(after, recording)
        profiler.stop(after, recording)

    frame = _jax.trace(around, [ref, ref])[0].jaxpr
    start, stop = frame.eqns
    before, after = frame.invars
    invars = [*body.invars[:inputs], before, *body.invars[inputs:], after]
    names = body.debug_info.arg_names
    if names is not None:
        names = (*names[:inputs], "traces", *names[inputs:], "traces")
    info = body.debug_info._replace(arg_names=names)
    body = body.replace(
        invars=invars,
        eqns=[start, *body.eqns, stop],
        effects=frozenset(jaxpr.effects) | frame.effects,
        debug_info=info,
    )
    return body, tuple(marks.names)


class _Marks(Rewrite):
    """Inserts the marks of scopes and of waits.

    Attributes:
      names: of the spans so far.
    """

    def __init__(self, recording: types.Recording, waiting: dict[int, str]):
        super().__init__()
        self.names: dict[tuple[str, bool], int] = {}
        self._recording, self._waiting = recording, waiting
        self._unmarked: set[Any] = set()

    def within(self, eqn: _jax.JaxprEqn) -> Rewrite:
        inner = [*_jax.jaxprs_in_params(eqn.params)]
        if eqn.primitive.name == "while":
            # A condition only computes.
            self._unmarked.add(eqn.params["cond_jaxpr"].jaxpr)
        self._unmarked.update(x for x in inner if _jax.is_of_jax(x))
        return self

    def prepared(self, jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
        if jaxpr in self._unmarked:
            return jaxpr
        eqns = [*self._with_marks(jaxpr.eqns)]
        return jaxpr if len(eqns) == len(jaxpr.eqns) else jaxpr.replace(eqns=eqns)

    def _with_marks(self, eqns: Sequence[_jax.JaxprEqn]) -> Iterator[_jax.JaxprEqn]:
        opened: list[str] = []
        last = None
        for eqn in eqns:
            scopes = _jax.scopes_of(eqn)
            same = 0
            while same < min(len(opened), len(scopes)) and (
                opened[same] == scopes[same]
            ):
                same += 1
            while len(opened) > same:
                yield self._mark(last, (opened.pop(), False), profiling.END)
            for name in scopes[same:]:
                opened.append(name)
                yield self._mark(eqn, (name, False))
            waits = self._waiting.get(id(eqn))
            if waits is not None:
                yield self._mark(eqn, (waits, True))
            yield eqn
            if waits is not None:
                yield self._mark(eqn, (waits, True), profiling.END)
            last = eqn
        while opened:
            yield self._mark(last, (opened.pop(), False), profiling.END)

    def _mark(self, at: Any, name: tuple[str, bool], end: int = 0) -> _jax.JaxprEqn:
        number = self.names.setdefault(name, len(self.names))
        return _mark_like(number | end, self._recording).replace(
            source_info=at.source_info
        )


@functools.lru_cache(maxsize=256)
def _mark_like(tag: int, recording: types.Recording) -> _jax.JaxprEqn:
    traced = _jax.trace(lambda: profiler.mark(tag, recording), [])[0]
    return traced.jaxpr.eqns[0]


def _waits(jaxpr: _jax.Jaxpr) -> Iterator[tuple[int, str]]:
    """Yields the identities of the equations that wait, and what they wait for."""
    sites, found = walk(jaxpr), dict[int, list[str]]()
    known = {
        value: name
        for site in sites
        if site.op.primitive is run_scoped_p
        for value, name in zip(site.op.made, site.op.params["names"], strict=True)
    }
    for site in sites:
        if site.op.name in _WAITS and registry.operation(site.op.primitive):
            names = found.setdefault(id(site.eqn), [])
            name = _waits_for(site, known)
            if name not in names:
                names.append(name)
    for eqn, names in found.items():
        # A function that waits for barriers that it is given.
        yield eqn, " or ".join(names)


def _waits_for(site: Site, known: dict[Any, str]) -> str:
    """Returns the name of what is waited for: `full[.]`, or that of the operation."""
    access = next(iter(site.op.accesses), None)
    name = "" if access is None else known.get(site.origin(access.buffer), "")
    if access is None or not name:
        return site.op.name
    window = access.window
    if window.array_shape in ((), (1,)):
        return name
    at = ("." if i in window.dynamic else str(s) for i, s in enumerate(window.starts))
    return f"{name}[{', '.join(at)}]"
