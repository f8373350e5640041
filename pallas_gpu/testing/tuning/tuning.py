# SPDX-License-Identifier: Apache-2.0
"""One search for the best configuration of a function, for one key on one card."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pallas_gpu import errors, expect
from pallas_gpu.runtime import cupti
from pallas_gpu.testing import cost
from pallas_gpu.testing.rounds import Timer
from pallas_gpu.testing.tuning import arguments, check, compile, search, store
from pallas_gpu.testing.tuning.arguments import Call, Key
from pallas_gpu.testing.tuning.candidates import Candidate, Outcome, all_failed
from pallas_gpu.testing.tuning.progress import Progress
from pallas_gpu.testing.tuning.report import TunedConfig, TuningReport

# Of the time, for compilation; what is not compiled by then is left out.
_COMPILING = 0.6


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `autotune`, checked."""

    configs: Any
    key: Key
    reference: Callable[..., Any] | None
    is_right: check.Check
    inputs: Callable[..., Any] | None
    seconds: float
    top: int | None
    processes: int | None
    flush_l2: bool
    cache_dir: Any
    progress: bool | None
    timer: Timer | None


def traced(call: Call, configs: Sequence[Any], progress: Progress) -> list[Candidate]:
    """Returns the candidates, traced, with the estimates of the cost model."""
    texts = map(arguments.text_of, configs)
    candidates = [
        Candidate(i, config, text)
        for i, (config, text) in enumerate(zip(configs, texts, strict=True))
    ]
    for candidate in candidates:
        compile.trace(candidate, call)
        if candidate.is_left and candidate.builds:
            # A kernel that the model cannot follow is tried in its place.
            with contextlib.suppress(Exception):
                candidate.estimate = cost.of_kernels(candidate.builds, None).seconds
        progress.advance()
    return candidates


def ranked_by_cost(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns those that are left, the best by the cost model first."""
    left = [c for c in candidates if c.is_left]
    return sorted(left, key=lambda c: math.inf if c.estimate is None else c.estimate)


def report_of(
    name: str,
    key: str,
    card: str,
    best: Candidate,
    candidates: Sequence[Candidate],
    start: float,
) -> TuningReport:
    """Returns the report of a search that has found the best candidate."""
    return TuningReport(
        function=name,
        key=key,
        card=card,
        index=best.index,
        config=best.text,
        milliseconds=search.median(best) if best.times else None,
        rows=tuple(map(TunedConfig.of, candidates)),
        seconds=time.monotonic() - start,
    )


class Tuning:
    """One search for the best configuration, for one key on one card."""

    def __init__(
        self, name: str, key: str, call: Call, options: Options, configs: Sequence[Any]
    ):
        self._name, self._key, self._call = name, key, call
        self._options, self._configs = options, configs
        self._texts = [arguments.text_of(config) for config in configs]
        device = cupti.first_gpu() or jax.devices()[0]
        self._card = str(device.device_kind)
        function = call.function
        self._identity = {
            "function": f"{function.__module__}.{function.__qualname__}",
            "source": arguments.digest(arguments.source_of(function)),
            "package": str(sys.modules["pallas_gpu"].__version__),
            "jax": jax.__version__,
            "card": self._card,
            "key": key,
            "configurations": arguments.digest(*self._texts),
        }
        digest = arguments.digest(*self._identity.values())
        self._path = store.path_of(store.folder(options.cache_dir), name, digest)

    def found(self, *, anew: bool) -> TuningReport:
        """Returns the report of a stored result, or of a search."""
        if not anew and (report := self._stored()) is not None:
            return report
        with store.locked(self._path, self._options.seconds):
            # Another process may have stored it while this one waited.
            if not anew and (report := self._stored()) is not None:
                return report
            # Candidates may be slow: that is what is to be found out.
            slow = errors.PerformanceWarning
            with warnings.catch_warnings(action="ignore", category=slow):
                report, kernel = self._search()
            record = {
                "format": store.FORMAT,
                "identity": self._identity,
                "index": report.index,
                "config": report.config,
                "kernel": kernel,
                "report": report.as_json(),
            }
            store.save(self._path, record)
            return report

    def _stored(self) -> TuningReport | None:
        """Returns a stored result, if its configuration still makes the same kernel."""
        record = store.load(self._path, self._identity)
        if record is None:
            return None
        index = record["index"]
        if not 0 <= index < len(self._texts) or self._texts[index] != record["config"]:
            return None
        candidate = Candidate(index, self._configs[index], record["config"])
        compile.trace(candidate, self._call)
        is_same = candidate.is_left and record["kernel"] == arguments.jaxpr_digest(
            candidate.traced
        )
        if not is_same:
            return None
        try:
            return TuningReport.from_json(record["report"])
        except (KeyError, TypeError) as error:
            store.set_aside(self._path, f"no valid field 'report': {error}")
            return None

    def _search(self) -> tuple[TuningReport, str]:
        options, start = self._options, time.monotonic()
        progress = Progress(options.progress)
        progress.begin("trace", len(self._configs))
        candidates = traced(self._call, self._configs, progress)
        ranked = ranked_by_cost(candidates)
        for candidate in ranked[options.top :] if options.top else ():
            candidate.end(
                Outcome.LEFT_OUT, f"not among the best {options.top} estimates"
            )
        try:
            best = self._measured(candidates, ranked[: options.top], start, progress)
        finally:
            progress.end()
        report = report_of(self._name, self._key, self._card, best, candidates, start)
        report = dataclasses.replace(report, steps=progress.seconds)
        return report, arguments.jaxpr_digest(best.traced)

    def _measured(
        self,
        candidates: Sequence[Candidate],
        ranked: Sequence[Candidate],
        start: float,
        progress: Progress,
    ) -> Candidate:
        options = self._options
        processes = options.processes
        if processes is None:
            processes = compile.default_processes()
        compiled_by = start + options.seconds * _COMPILING
        compile.compile_offline(ranked, processes, compiled_by, progress)
        arrays = self._arrays()
        compile.compile_for_device(ranked, arrays, compiled_by, progress)
        in_order = sorted(ranked, key=lambda c: c.index)
        expected = self._expected(arrays)
        check.check_all(in_order, arrays, expected, options.is_right, progress)
        if not any(c.is_left for c in ranked):
            raise all_failed(self._name, candidates)
        return search.measure(
            ranked,
            arrays,
            timer=options.timer,
            flush_l2=options.flush_l2,
            deadline=start + options.seconds,
            progress=progress,
        )

    def _arrays(self) -> list[Any]:
        call, make = self._call, self._options.inputs
        if make is None or not call.is_traced:
            return arguments.inputs(call)
        args, named = call.arguments(call.types)
        made = make(*args, **named)
        is_pair = expect.is_sequence(made) and len(made) == 2
        if not is_pair or not isinstance(made[1], Mapping):
            raise expect.wrong_type(
                "autotune: what inputs returned",
                "a tuple of arguments and a dict of named ones",
                "(a, b), {'c': c}",
                made,
                "return the arguments of one call",
            )
        filled = Call.of(call.function, *made)
        types = [(x.shape, x.dtype) for x in filled.types]
        if types == [(x.shape, x.dtype) for x in call.types]:
            return filled.arrays
        raise errors.ShapeError(
            "autotune: what inputs returned has other types than the arguments",
            expected=arguments.described(call.types),
            got=arguments.described(filled.types),
            hint="return arrays of the shapes and dtypes that inputs is given",
        )

    def _expected(self, arrays: Sequence[Any]) -> Any:
        if self._options.reference is None:
            return None
        args, named = self._call.arguments(arrays)
        return jax.block_until_ready(self._options.reference(*args, **named))
