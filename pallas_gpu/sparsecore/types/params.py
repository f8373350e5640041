# SPDX-License-Identifier: Apache-2.0
"""How a kernel for SparseCores is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from pallas_gpu import errors, expect
from pallas_gpu.arch import tpu
from pallas_gpu.sparsecore.types.refs import TilingName


def _target(value: Any, what: str) -> str | None:
    return None if value is None else tpu.target(value).name


def _opt_level(value: Any, what: str) -> str:
    """Accepts a name, upstream's `OptLevel`, and None for the default."""
    return _LEVEL("O3" if value is None else getattr(value, "name", value), what)


_LEVEL = expect.choice("O1", "O2", "O3")
_NO_LAYOUT_PASSES = (
    "vectors are registers as written: without layout passes every operation compiles"
)


@expect.arguments(
    target=_target,
    opt_level=_opt_level,
    use_tc_tiling_on_sc=expect.optional(expect.boolean),
    debug_checks=expect.refused(False, "the emulator makes the checks of a body"),
    needs_layout_passes=expect.refused(False, _NO_LAYOUT_PASSES),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerParams:
    """Parameters of compilation.

    Attributes:
      target: the chip, `v5p`, `v6e` or `tpu7x`; None: the attached TPU, else tpu7x.
      tiling: how arrays lie in memory. `"compact"`: those of two and more dimensions in
        tiles of (8, 128), as on the TensorCore; rows of indirect copies are then
        multiples of 128 words. `"sparsecore"`: the last dimension in units of 8 words;
        rows of any width, but XLA copies an operand from its own tiling at each call.
      use_tc_tiling_on_sc: upstream's name of the tiling: True is `"compact"`, False
        `"sparsecore"`.
      opt_level: of libtpu's back end; it pipelines loops at O3.
      skip_device_barrier: whether XLA may omit the barrier around the kernel.
      disable_bounds_checks, disable_semaphore_checks: whether libtpu leaves out these
        checks at run time; the emulator makes them.
      has_side_effects: keeps a launch whose results nobody uses.
      debug_checks: False; checks of a body are not compiled.
      needs_layout_passes: False; layout passes of the compiler are not supported.

    Raises:
      TargetError: an unknown chip.
      ArgumentError, ArgumentTypeError: another invalid value, or two tilings.
    """

    profile_space: ClassVar[int] = 0  # nothing is recorded
    target: str | None = None
    tiling: TilingName = "compact"
    use_tc_tiling_on_sc: dataclasses.InitVar[bool | None] = None
    opt_level: Literal["O1", "O2", "O3"] = "O3"
    skip_device_barrier: bool = False
    disable_bounds_checks: bool = False
    disable_semaphore_checks: bool = False
    has_side_effects: bool = False
    debug_checks: bool = False
    needs_layout_passes: bool = False

    def __post_init__(self, use_tc_tiling_on_sc: bool | None) -> None:
        if use_tc_tiling_on_sc and self.tiling == "sparsecore":
            raise errors.ArgumentError(
                "CompilerParams: tiling and use_tc_tiling_on_sc are different tilings",
                expected="one of the two arguments",
                got="tiling='sparsecore', use_tc_tiling_on_sc=True",
                hint="use_tc_tiling_on_sc=True is tiling='compact'",
            )
        if use_tc_tiling_on_sc is False:
            object.__setattr__(self, "tiling", "sparsecore")
