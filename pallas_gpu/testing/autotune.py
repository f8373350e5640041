# SPDX-License-Identifier: Apache-2.0
"""`autotune`: chooses a function's configuration by measuring it, and remembers it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu import _jax, errors, expect
from pallas_gpu.entry import call as entry_call
from pallas_gpu.entry import scope
from pallas_gpu.runtime import register
from pallas_gpu.testing import calling
from pallas_gpu.testing.bench import seconds as seconds_rule
from pallas_gpu.testing.rounds import Timer
from pallas_gpu.testing.tuning import arguments, tuning
from pallas_gpu.testing.tuning import check as checks
from pallas_gpu.testing.tuning.arguments import CONFIG, Call, Key
from pallas_gpu.testing.tuning.candidates import Outcome, all_failed
from pallas_gpu.testing.tuning.progress import Progress
from pallas_gpu.testing.tuning.report import TunedConfig, TuningReport

_DEFAULT_SECONDS = 120.0


def _configs(value: Any, what: str) -> Any:
    if expect.is_sequence(value):
        return arguments.listed(value, what)
    if isinstance(value, str | bytes | type) or not callable(value):
        raise expect.wrong_type(
            what,
            "a sequence of configurations",
            "[config, ...], or a function of the arguments that returns such a list",
            value,
            "list the configurations to try",
        )
    return expect.function(value, what)


def _key(value: Any, what: str) -> Any:
    rule = expect.function if callable(value) else expect.names
    return rule(value, what)


def _tolerance(value: Any, what: str) -> float:
    number = expect.number(value, what)
    if 0 <= number < math.inf:
        return number
    raise errors.ArgumentError(
        f"{what} is out of range",
        expected="0 or more",
        got=number,
        hint="pass check=lambda results, expected: True to accept every result",
    )


def _path(value: Any, what: str) -> str:
    if isinstance(value, str | os.PathLike) and os.fspath(value):
        return str(os.fspath(value))
    raise expect.wrong_type(what, "a folder", "a path", value, "pass it as a string")


@expect.arguments(
    configs=_configs,
    key=expect.optional(_key),
    rtol=expect.optional(_tolerance),
    atol=expect.optional(_tolerance),
    seconds=seconds_rule(),
    top=expect.optional(expect.integer(1)),
    processes=expect.optional(expect.integer(0, 256)),
    cache_dir=expect.optional(_path),
)
def autotune(
    *,
    configs: Sequence[Any] | Callable[..., Sequence[Any]],
    key: Key = None,
    reference: Callable[..., Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    check: Callable[[Any, Any], Any] | None = None,
    inputs: Callable[..., Any] | None = None,
    seconds: float = _DEFAULT_SECONDS,
    top: int | None = None,
    processes: int | None = None,
    flush_l2: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    timer: Timer | None = None,
) -> Callable[[Callable[..., Any]], Autotuned]:
    """Returns a decorator that chooses a function's argument `config=` by measuring.

    Since: any GPU of JAX. Issued by: the host.

    The first call for a key tries the configurations: it ranks them by a cost model,
    compiles their kernels offline in parallel and takes out those that fail or spill
    registers, compares the results of the others, and measures them interleaved, ending
    the slow ones early. Later calls use the best one. The result is stored as JSON on
    disk, for the function's source, the versions of this package and of JAX, the key,
    the configurations and the card; it is used as long as the kernel of the chosen
    configuration is traced to the same operations.

    Under `jax.jit` and other transformations the arguments have no values: the
    configurations then run on random arrays of the same shapes, normal for floats, from
    1 to 7 for integers, while the function is traced; under `jax.vmap`, on those of one
    example. Functions of arguments for which such values make no sense, such as
    positions in an array, need `inputs`.

    The configurations run in this process: one whose kernel never ends, or accesses
    memory that is not its own, ends the tuning in the same way. The emulator finds such
    kernels.

    Without a GPU nothing is measured: the configuration with the best estimate of the
    cost model is used, which a warning says once for each function.

    Args:
      configs: the configurations, or a function of the arguments that returns them.
      key: on which arguments the choice depends: names of parameters, or a function of
        the arguments; default: shapes and dtypes of arrays, and all other arguments.
      reference: a function of the same arguments, without `config`, that computes the
        right results; default: the first configuration that runs.
      rtol: relative tolerance of results; default: four roundings of their type, 0.001
        for floats of more than 16 bits; integers must be equal.
      atol: absolute tolerance; default: `rtol` times the root mean square of what is
        expected.
      check: instead of tolerances, a function of results and expected results that
        raises or returns False for wrong ones.
      inputs: a function of the types of the arguments that returns values for them, as
        a tuple and a dict; used where the arguments have none.
      seconds: time for a tuning. What is not compiled after six tenths of it is left
        out; the measurement ends with it, after one round at least.
      top: compile and measure only so many configurations, the best by the cost model.
      processes: child processes of the offline compiler; 0: kernels are not compiled
        offline; default: half of the cores, at most 8.
      flush_l2: measure with arguments that are not in the L2 cache.
      cache_dir: folder of the stored results; default: PALLAS_GPU_TUNING_DIR, or
        pallas_gpu/tuning in the user's folder of caches.
      progress: show a bar, which requires tqdm; default: on a terminal.
      timer: replaces CUPTI, as in `testing.do_bench`; with one, the configurations are
        measured on any machine.

    Returns:
      A decorator; the decorated function has `config` as an optional argument, and the
      methods of `testing.Autotuned`.

    Raises:
      TuningError: in a call: no configuration can be used; it lists why each cannot.
      ArgumentTypeError: the function has no parameter `config`.

    Example:
      >>> @plgpu.autotune(configs=[ops.MatmulConfig(stages=s) for s in (3, 4)])
      ... def matmul(a, b, config):
      ...     return ops.matmul(a, b, config=config)
    """
    is_right = check or functools.partial(_close, rtol, atol)
    options = tuning.Options(
        configs, key, reference, is_right, inputs, seconds, top, processes,
        flush_l2, cache_dir, progress, timer,
    )  # fmt: skip
    return lambda function: Autotuned(_tunable(function), options)


def _close(rtol: float | None, atol: float | None, results: Any, right: Any) -> None:
    checks.close(results, right, rtol=rtol, atol=atol)


def _tunable(function: Any) -> Callable[..., Any]:
    function = expect.function(function, "autotune: the decorated object")
    with contextlib.suppress(ValueError):
        kinds = {
            p.name: p.kind for p in inspect.signature(function).parameters.values()
        }
        by_name = (
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        if kinds.get(CONFIG) in by_name or inspect.Parameter.VAR_KEYWORD in set(
            kinds.values()
        ):
            return function
    raise errors.ArgumentTypeError(
        "autotune: the function has no parameter config",
        expected="def f(..., config): ...",
        got=f"{getattr(function, '__name__', 'function')}({', '.join(kinds)})",
        hint="add a parameter config, and pass it to the kernel",
    )


class Autotuned:
    """A function whose configuration is chosen by measuring; made by `autotune`.

    Attributes:
      reports: what was tried, by the keys of this process's calls.
    """

    def __init__(self, function: Callable[..., Any], options: Any):
        functools.update_wrapper(self, function)
        self.reports: dict[str, TuningReport] = {}
        self._function = function
        self._name = str(getattr(function, "__name__", "function"))
        self._options: tuning.Options = options
        self._chosen: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._has_warned = False

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Calls the function with the best configuration, or with `config=`."""
        if CONFIG not in named:
            named = {**named, CONFIG: self.best(*args, **named)}
        return self._function(*args, **named)

    def __get__(self, owner: Any, _: Any = None) -> Any:
        """Binds the function as a method; its object is then a part of the key."""
        return self if owner is None else functools.partial(self, owner)

    def best(self, *args: Any, **named: Any) -> Any:
        """Returns the configuration for some arguments; tunes if it is not known.

        Raises:
          TuningError: no configuration can be used.
        """
        with self._lock, errors.at(scope.called_at):
            key = self._key(args, named)
            if key not in self._chosen:
                self._find(key, args, named, anew=False)
            return self._chosen[key]

    def tune(self, *args: Any, **named: Any) -> TuningReport:
        """Tunes for some arguments, also if a result is known; returns the report.

        Raises:
          TuningError: no configuration can be used.
        """
        with self._lock, errors.at(scope.called_at):
            key = self._key(args, named)
            return self._find(key, args, named, anew=True)

    def _key(self, args: Any, named: Any) -> str:
        signature = inspect.signature(self._function)
        try:
            signature.bind(*args, **{**named, CONFIG: None})
        except TypeError as error:
            raise errors.ArgumentTypeError(
                f"{self._name}: the arguments do not match its signature",
                expected=f"{self._name}{signature}",
                got=str(error),
                hint="config is chosen if it is not given, by its name",
            ) from None
        return arguments.key_of(self._options.key, signature, args, named)

    def _find(self, key: str, args: Any, named: Any, *, anew: bool) -> TuningReport:
        options, call = self._options, Call.of(self._function, args, named)
        configs = options.configs
        if callable(configs):
            made = calling.call("autotune: configs", configs, *args, **named)
            configs = arguments.listed(made, "autotune: what configs returned")
        # The surrounding trace must not record what is done here.
        with _jax.outside_of_traces():
            report: TuningReport
            if len(configs) == 1:
                report = _without_choice(self._name, key, configs[0])
            elif options.timer is None and not _runs_on_gpu(call):
                report = self._estimated(key, call, configs)
            else:
                search = tuning.Tuning(self._name, key, call, options, configs)
                report = search.found(anew=anew)
        self.reports[key] = report
        self._chosen[key] = configs[report.index]
        return report

    def _estimated(self, key: str, call: Call, configs: Sequence[Any]) -> TuningReport:
        start = time.monotonic()
        candidates = tuning.traced(call, configs, Progress(False))
        left = tuning.ranked_by_cost(candidates)
        if not left:
            raise all_failed(self._name, candidates)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._name}: there is no GPU to measure on; the cost model "
                f"chooses among {len(configs)} configurations",
                errors.TuningWarning,
                stacklevel=5,
            )
        for candidate in left:
            candidate.end(Outcome.LEFT_OUT, "no GPU to measure on")
        card = f"{register.attached_target().name}, not measured"
        return tuning.report_of(self._name, key, card, left[0], candidates, start)


def _without_choice(name: str, key: str, config: Any) -> TuningReport:
    text = arguments.text_of(config)
    row = TunedConfig(text, Outcome.LEFT_OUT.value, reason="it is the only one")
    return TuningReport(name, key, "any card", 0, text, None, (row,), 0.0)


def _runs_on_gpu(call: Call) -> bool:
    """Whether the call's kernels would run on a GPU, and not in the emulator."""
    if entry_call.resolve_interpret(None) is not None:
        return False
    arrays = [] if call.is_traced else call.arrays
    return entry_call.platform_of(arrays) in ("gpu", "cuda")
