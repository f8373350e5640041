# SPDX-License-Identifier: Apache-2.0
"""Parameters of compilation and of the emulator."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pallas_gpu import arch, errors, expect
from pallas_gpu.types.profiling.recording import TraceScope
from pallas_gpu.types.spaces.memory_space import MemorySpace, memory_space


class LoweringSemantics(enum.Enum):
    """Who chooses the register layouts of a kernel.

    * `Lane`: the author; operands with different layouts are an error.
    * `Warpgroup`: the compiler infers them.
    """

    Lane = "lane"
    Warpgroup = "warpgroup"


class OOBFillMode(enum.Enum):
    """What a copy reads outside of the array.

    * `UNDEFINED`: anything.
    * `ZEROS`: zeros.
    * `NAN`: NaN, in arrays of float16, bfloat16, float32 and float64, by TMA. Its bits
      are 0x7ff7 in each 16 bits (measured on an H200 for all but float64).
    * `PROMISE_IN_BOUNDS`: nothing; the copy is in bounds.
    """

    UNDEFINED = "undefined"
    ZEROS = "zeros"
    NAN = "nan"
    PROMISE_IN_BOUNDS = "promise_in_bounds"


class AsyncCopyImplementation(enum.Enum):
    """What carries an asynchronous copy from GMEM to SMEM.

    * `TMA`: one thread issues the copy of a box, whose rows are multiples of 16 bytes,
      or of adjacent bytes, which are such a multiple.
    * `CP_ASYNC`: all threads copy, up to 16 bytes at a time: any slice of any array.
    """

    TMA = "tma"
    CP_ASYNC = "cp_async"


_WHEN_USED: list[Callable[[], None]] = []


def on_use_of_params(action: Callable[[], None]) -> None:
    """Registers what is done before JAX uses `CompilerParams` as a parameter.

    JAX hashes the parameters of every operation that it traces: that is the first that
    this package learns of a call of JAX's own `pl.pallas_call`.
    """
    _WHEN_USED.append(action)


def _semantics(value: Any, what: str) -> tuple[str, ...]:
    """Accepts a sequence of names, or of members of an enumeration of them."""
    members = value if expect.is_sequence(value) else ()
    words = [getattr(x, "name", x) for x in members]
    if expect.is_sequence(value) and all(isinstance(x, str) for x in words):
        return tuple(x.lower() for x in words)
    raise expect.wrong_type(
        what, "a sequence of strings", "a string for each grid axis", value,
        "write ('parallel',) * len(grid), or leave it out",
    )  # fmt: skip


def _target(value: Any, what: str) -> str:
    return arch.target(expect.string(value, what)).name


def _ctas(value: Any, what: str) -> bool | int:
    """Accepts False, True, and a number of CTAs."""
    rule = expect.integer(
        1, unit="CTAs", hint="pass True for one on each SM, or leave it out"
    )
    return value if isinstance(value, bool) else rule(value, what)


@expect.arguments(
    None,
    "warps are not a parameter of the compiler: pass num_threads=..., a number of "
    "warpgroups, to kernel or pallas_call",
    dimension_semantics=expect.optional(_semantics),
    max_concurrent_steps=expect.integer(1, unit="steps"),
    block_memory_space=expect.optional(memory_space),
    num_stages=expect.optional(expect.integer(1, unit="stages")),
    persistent=_ctas,
    strip=expect.optional(expect.integer(1, unit="tiles")),
    reduction_scratch_bytes=expect.optional(
        expect.integer(
            0,
            unit="bytes",
            hint="leave it out for 2048 bytes",
            out_of_range="is negative",
        )
    ),
    lowering_semantics=expect.member(LoweringSemantics),
    target=expect.optional(_target),
    profile_space=expect.integer(0, 1 << 20, unit="spans"),
    profile_trace_scope=expect.member(TraceScope),
    ir_version=expect.optional(expect.integer(1)),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerParams:
    """Parameters of compilation.

    Attributes:
      approx_math: fast approximations of exp, log, tanh and others for float32. One
        function alone: `jax.lax.exp(x, accuracy=jax.lax.Tolerance(rtol=1e-5))`.
      dimension_semantics: `pallas_call` only: for each grid axis `"parallel"`, an axis
        of the launch, or `"arbitrary"`, a loop in each CTA. Default: all parallel.
      max_concurrent_steps: `pallas_call` only: number of SMEM buffers of a block that
        changes along "arbitrary" axes; copies run up to this many steps ahead.
      block_memory_space: `pallas_call` only: memory of blocks whose `BlockSpec` names
        none. GMEM: the body accesses them there, as in Triton. None: SMEM.
      num_stages: of loops of the body with products of what they load from GMEM: the
        copies ahead of `plgpu.loop(..., num_stages=)`, of loads of 2 KiB or more, also
        in `lax.fori_loop`, and in a `lax.scan` over a `jnp.arange`; a loop that can not
        have them stays as it is, and `plgpu.explain` says why. 1: none. None: two,
        where they leave an SM its blocks.
      persistent: `pallas_call` only: launch this many CTAs, with True one for each SM;
        CTA i of n has the positions i, i + n, i + 2n … of the parallel axes, one after
        another. With `num_threads` the copies for the next position start while the
        body still works on the one before. Scratch in registers starts anew at each
        position, that in SMEM is as the last one has left it.
      strip: `pallas_call` only: order of positions on the last two parallel axes: by
        strips of this many columns, row by row, as `planar_snake` has them, so that
        CTAs that run at the same time share rows and columns in L2. None: row-major.
      unsafe_no_auto_barriers: drop the warpgroup barriers that order SMEM accesses,
        and the proxy fences before copies that overwrite SMEM.
      reduction_scratch_bytes: SMEM of each warpgroup for reductions and relayouts that
        cross warps; less where the kernel's arrays leave less. A kernel without such
        operations has none. None: 2048, and more where inferred layouts need it.
      lowering_semantics: `Warpgroup` (default) or `Lane`.
      target: `"sm_90a"`, `"sm_100a"`, `"sm_103a"`, or None: the attached GPU, else the
        first that has what the kernel uses; a kernel with tcgen05 names `"sm_103a"`.
      line_info: keep file and line down to PTX (also PALLAS_GPU_LINEINFO=1).
      debug_checks: compile the kernel's `debug_check`s (also
        PALLAS_GPU_DEBUG_CHECKS=1). The emulator always makes them.
      profile_space: number of spans, each a `jax.named_scope` that is entered, that a
        warpgroup or a warp records, 16 bytes each; later ones are dropped and
        counted. 0: none, and no code for them.
      profile_dir: the folder that gets a file of each call, `<time>-trace.json`.
      profile_trace_scope: who records: `TraceScope.WARPGROUP` or `TraceScope.WARP`.
      profile_bounds_check: a hint: bounds are always checked.
      profile_waits: waits are spans, too, with the names of their barriers.
      skip_device_barrier: do not wait for the other devices before a kernel that
        accesses their memory starts; what precedes the kernel has to.
      is_multi_process: the devices belong to several processes: a kernel that accesses
        other devices' memory gets its arrays in symmetric memory.
      ir_version: of the form in which XLA gets the kernel, which older plugins read.
        None: the newest one; in `jax.export` one that older plugins read.

    Raises:
      ArgumentError, ArgumentTypeError, TargetError: an invalid value.
    """

    approx_math: bool = False
    dimension_semantics: Sequence[str] | None = None
    max_concurrent_steps: int = 1
    block_memory_space: MemorySpace | None = None
    num_stages: int | None = None
    persistent: bool | int = False
    strip: int | None = None
    unsafe_no_auto_barriers: bool = False
    reduction_scratch_bytes: int | None = None
    lowering_semantics: LoweringSemantics = LoweringSemantics.Warpgroup
    target: str | None = None
    line_info: bool = False
    debug_checks: bool = False
    profile_space: int = 0
    profile_dir: str = ""
    profile_trace_scope: TraceScope = TraceScope.WARPGROUP
    profile_bounds_check: bool = False
    profile_waits: bool = False
    skip_device_barrier: bool = False
    is_multi_process: bool = False
    ir_version: int | None = None

    def __post_init__(self) -> None:
        if bool(self.profile_space) != bool(self.profile_dir):
            raise errors.ArgumentError(
                "profile_space and profile_dir are given one without the other",
                expected="both, or neither",
                got=f"profile_space={self.profile_space}, "
                f"profile_dir={self.profile_dir!r}",
                hint="testing.profile(f)(*args) profiles a function without either",
            )

    def replace(self, **fields: Any) -> CompilerParams:
        """Returns the parameters with other fields, as `dataclasses.replace` does."""
        return dataclasses.replace(self, **fields)

    def __hash__(self) -> int:
        for action in _WHEN_USED:
            action()
        return hash(_fields(self))


_fields = operator.attrgetter(*(f.name for f in dataclasses.fields(CompilerParams)))


_COMPUTES = "the emulator computes all operations: leave it out"
_ITS_OWN = "the emulator sizes its clocks itself: leave it out"
_RAISES = "the emulator raises; InterpretParams(detect_races=False) runs on"


@expect.arguments(
    max_steps=expect.integer(
        1,
        unit="steps",
        hint="leave it out for a million",
        out_of_range="is not positive",
    ),
    schedules=expect.integer(
        1,
        unit="schedules",
        hint="leave it out to run a kernel once",
        out_of_range="is not positive",
    ),
    on_race=expect.refused("raise", _RAISES),
    skip_floating_point_ops=expect.refused(False, _COMPUTES),
    vector_clock_size=expect.refused(None, _ITS_OWN),
    num_cores_or_threads=expect.integer(1, unit="threads"),
    num_tma_threads_per_device=expect.integer(1, unit="threads"),
    logging_mode=expect.optional(
        expect.instance(enum.Flag, written="jax's LoggingMode.BARRIER")
    ),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class InterpretParams:
    """Parameters of the emulator.

    Attributes:
      seed: decides every choice of the scheduler and of asynchronous work; the same
        seed repeats a run exactly.
      max_steps: steps in which no CTA has ended, after which a run counts as a
        livelock. A step is an operation with an effect, an iteration of a loop, or 4096
        elements that an operation computes or moves; a million take some 15 seconds.
      detect_races: whether to compare the accesses of threads, and of CTAs, with each
        other. False is faster; accesses of asynchronous work are compared all the same,
        but with `like_upstream`.
      out_of_bounds_reads: `"raise"`, or `"uninitialized"` to read poison.
      uninitialized_memory: `"nan"` fills fresh memory with poison, and a use of it is
        an error; `"zero"` fills it with zeros, which count as values.
      asynchrony: when a copy in flight completes: `"random"` lets the seed decide,
        `"eager"` at once, `"late"` as late as the waits allow.
      partial_results: accept results with elements that no CTA stored, and stores of
        poison to results; such elements are poison afterwards.
      schedules: how many times to run the kernel, with consecutive seeds, and each
        asynchrony in turn unless one is chosen. The first failure is reported, with the
        parameters that repeat it; so are results that depend on the schedule.
      emitted: whether to run the code that the kernel is lowered to, by the rules of
        the PTX ISA, instead of the traced body: `interpret="emitted"`. Of the other
        parameters it then uses `seed` alone.
      like_upstream: accept what upstream's interpreter accepts, to run kernels before
        they are cleaned up: stores to inputs, which change the kernel's own copy of the
        array; results as under `partial_results`; copies that are not waited for when
        their scope or the kernel ends; and semaphores that are not zero then. With
        `detect_races=False`, upstream's default, also accesses that no wait orders with
        asynchronous work; `asynchrony="eager"` performs that work at once, as upstream.
      on_race: `"raise"`; upstream's `"warn"` is refused.
      skip_floating_point_ops: False; upstream's True is refused.
      vector_clock_size: None; other values are refused, as upstream refuses them.
      num_cores_or_threads: a hint that the emulator does not use: the kernel's mesh
        says how many threads there are.
      num_tma_threads_per_device: a hint that the emulator does not use.
      logging_mode: a hint that the emulator does not use: it has no log.
      inline_mgpu: what becomes of inline code without `emulate`: `"error"` runs the
        kernel as with `emitted`, which raises where an instruction is not modelled;
        `"ignore"` skips code without results.

    Raises:
      ArgumentError, ArgumentTypeError: an invalid value.
      UnsupportedError: a value of a parameter of upstream's that is not supported.
    """

    seed: int = 0
    max_steps: int = 1_000_000
    detect_races: bool = True
    out_of_bounds_reads: Literal["raise", "uninitialized"] = "raise"
    uninitialized_memory: Literal["nan", "zero"] = "nan"
    asynchrony: Literal["random", "eager", "late"] = "random"
    partial_results: bool = False
    schedules: int = 1
    emitted: bool = False
    like_upstream: bool = False
    on_race: Literal["raise"] = "raise"
    skip_floating_point_ops: bool = False
    vector_clock_size: None = None
    num_cores_or_threads: int = 1
    num_tma_threads_per_device: int = 5
    logging_mode: enum.Flag | None = None
    inline_mgpu: Literal["error", "ignore"] = "error"

    def each_schedule(self) -> list[InterpretParams]:
        """Returns the parameters of every single run."""
        # Late completion shows missing waits, eager completion early overwrites.
        modes: tuple[Literal["random", "late", "eager"], ...]
        modes = ("random", "late", "eager")
        if self.asynchrony != "random":
            modes = (self.asynchrony,)
        return [
            dataclasses.replace(
                self, seed=self.seed + i, asynchrony=modes[i % len(modes)], schedules=1
            )
            for i in range(self.schedules)
        ]

    def __str__(self) -> str:
        """The call that makes these parameters, without defaults."""
        given = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"InterpretParams({', '.join(given)})"
