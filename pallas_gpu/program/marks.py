# SPDX-License-Identifier: Apache-2.0
"""Bodies with marks: where the spans of scopes and of waits begin and end."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from pallas_gpu import _jax, types
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import profiler
from pallas_gpu.primitives.scoped import run_scoped_p
from pallas_gpu.program.bodies import bodies, kept
from pallas_gpu.program.build import CALLS
from pallas_gpu.program.rewrite import Rewrite
from pallas_gpu.program.walk import Site, walk
from pallas_gpu.types.profiling import trace


@kept
def marked(
    jaxpr: _jax.Jaxpr,
    inputs: int,
    traces: Any,
    recording: types.Recording,
    waits: bool,
) -> tuple[_jax.Jaxpr, types.SpanNames]:
    """Returns a body with marks, and the names of its spans.

    Args:
      jaxpr: of a kernel.
      inputs: number of its inputs.
      traces: the type of one more result, whose initial contents are one more input.
      recording: how traces are recorded.
      waits: whether waits are spans.
    """
    marks = _Marks(recording, dict(_waits(jaxpr)) if waits else {})
    body = marks.body(jaxpr)

    def around(before: Any, after: Any) -> None:
        del before
        profiler.start(after, recording, marks.names)
        profiler.stop(after, recording)

    frame = _jax.trace(around, [traces, traces])[0].jaxpr
    start, stop = frame.eqns
    before, after = frame.invars
    names = body.debug_info.arg_names
    if names is not None:
        names = (*names[:inputs], "traces", *names[inputs:], "traces")
    body = body.replace(
        invars=[*body.invars[:inputs], before, *body.invars[inputs:], after],
        eqns=[start, *body.eqns, stop],
        effects=frozenset(body.effects) | frame.effects,
        debug_info=body.debug_info._replace(arg_names=names),
    )
    return body, marks.names


class _Marks(Rewrite):
    """Inserts the marks of scopes and of waits.

    Attributes:
      names: of the spans so far.
    """

    def __init__(self, recording: types.Recording, waiting: dict[int, str]):
        super().__init__()
        self.names = types.SpanNames()
        self._recording, self._waiting = recording, waiting
        self._unmarked: set[Any] = set()

    def within(self, eqn: _jax.JaxprEqn) -> Rewrite:
        inner = [body.jaxpr for body in bodies(eqn)]
        if eqn.primitive.name == "while":
            # The condition comes first, and only computes.
            self._unmarked.add(inner[0])
        if eqn.primitive.name in CALLS:
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
                yield self._mark(last, (opened.pop(), False), trace.END)
            for name in scopes[same:]:
                opened.append(name)
                yield self._mark(eqn, (name, False))
            waits = self._waiting.get(id(eqn))
            if waits is not None:
                yield self._mark(eqn, (waits, True))
            yield eqn
            if waits is not None:
                yield self._mark(eqn, (waits, True), trace.END)
            last = eqn
        while opened:
            yield self._mark(last, (opened.pop(), False), trace.END)

    def _mark(self, at: Any, name: tuple[str, bool], end: int = 0) -> _jax.JaxprEqn:
        number = self.names.number(*name)
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
        operation = registry.operation(site.op.primitive)
        if operation is not None and operation.waits:
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
