# SPDX-License-Identifier: Apache-2.0
"""Parameters of compilation and of the emulator."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Literal

from pallas_gpu import _jax, arch, errors


class LoweringSemantics(enum.Enum):
    """Who chooses the register layouts of a kernel.

    * `Lane`: the author; operands with different layouts are an error.
    * `Warpgroup`: the compiler infers them.
    """

    Lane = "lane"
    Warpgroup = "warpgroup"


class OOBFillMode(enum.Enum):
    """What a copy reads outside of the array."""

    UNDEFINED = "undefined"
    ZEROS = "zeros"
    PROMISE_IN_BOUNDS = "promise_in_bounds"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerParams:
    """Parameters of compilation.

    Attributes:
      approx_math: fast approximations of exp, log, tanh and others for float32.
      dimension_semantics: accepted for `pallas_call`: each grid axis is `"parallel"`.
      max_concurrent_steps: reserved for pipelines.
      unsafe_no_auto_barriers: drop the warpgroup barriers that order SMEM accesses.
      reduction_scratch_bytes: SMEM of each warpgroup for reductions and relayouts that
        cross warps; less where the kernel's arrays leave less. A kernel without such
        operations has none. None: 2048, and more where inferred layouts need it.
      lowering_semantics: `Warpgroup` (default) or `Lane`.
      target: `"sm_90a"`, `"sm_100a"`, or None: the attached GPU, else sm_90a.
      line_info: keep file and line down to PTX (also PALLAS_GPU_LINEINFO=1).

    Raises:
      ArgumentError, TargetError: a value out of range.
    """

    approx_math: bool = False
    dimension_semantics: Sequence[str] | None = None
    max_concurrent_steps: int = 1
    unsafe_no_auto_barriers: bool = False
    reduction_scratch_bytes: int | None = None
    lowering_semantics: LoweringSemantics = LoweringSemantics.Warpgroup
    target: str | None = None
    line_info: bool = False

    def __post_init__(self):
        if self.target is not None:
            _require_target(self.target)
        if self.dimension_semantics is not None:
            object.__setattr__(
                self, "dimension_semantics", tuple(map(str, self.dimension_semantics))
            )
        if (self.reduction_scratch_bytes or 0) < 0:
            raise errors.ArgumentError(
                "CompilerParams: reduction_scratch_bytes is negative",
                expected="0 or more bytes",
                got=self.reduction_scratch_bytes,
                hint="leave it out for 2048 bytes",
                where=_jax.where_now(),
            )


def _require_target(name: str) -> None:
    try:
        arch.target(name)
    except errors.PallasGpuError as error:
        raise error.with_location(_jax.where_now()) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterpretParams:
    """Parameters of the emulator.

    Attributes:
      seed: decides every choice of the scheduler and of asynchronous work; the same
        seed repeats a run exactly.
      max_steps: scheduler steps after which a run counts as a livelock.
      detect_races: compare every access with the accesses it is not ordered with.
      out_of_bounds_reads: `"raise"`, or `"uninitialized"` to read poison.
      uninitialized_memory: `"nan"` fills fresh memory with poison, `"zero"` with zeros.
      asynchrony: when a copy in flight completes: `"random"` lets the seed decide,
        `"eager"` at once, `"late"` as late as the waits allow.

    Raises:
      ArgumentError: a value out of range.
    """

    seed: int = 0
    max_steps: int = 10_000_000
    detect_races: bool = False
    out_of_bounds_reads: Literal["raise", "uninitialized"] = "raise"
    uninitialized_memory: Literal["nan", "zero"] = "nan"
    asynchrony: Literal["random", "eager", "late"] = "random"

    def __post_init__(self):
        choices = {
            "out_of_bounds_reads": ("raise", "uninitialized"),
            "uninitialized_memory": ("nan", "zero"),
            "asynchrony": ("random", "eager", "late"),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise errors.ArgumentError(
                    f"InterpretParams: invalid value of {field}",
                    expected=" or ".join(map(repr, allowed)),
                    got=repr(getattr(self, field)),
                    hint=f"leave it out for {allowed[0]!r}",
                    where=_jax.where_now(),
                )
        if self.max_steps < 1:
            raise errors.ArgumentError(
                "InterpretParams: max_steps is not positive",
                expected="1 or more steps",
                got=self.max_steps,
                hint="leave it out for ten million",
                where=_jax.where_now(),
            )
