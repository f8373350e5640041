# SPDX-License-Identifier: Apache-2.0
"""The GPU as the PTX ISA describes it, for emitted modules on a CPU; a file per unit.

`interpret="emitted"` runs kernels here: the code that they are lowered to, instead of
their traced bodies, which the emulator runs.

Warps of a strand take each step together. Whether a kernel waits, fences and signals
as it must is checked; asynchronous work completes as late as the waits allow.

`program` compiles a kernel's body, `engine` runs strands, `clocks` and `memory` know
what happens before what, `launch` runs the host function and the clusters of a grid. A
hardware unit is a file that `launch` imports: it registers its operations with
`program.runs`, and its inline PTX with `registers.assembles`.
"""

from __future__ import annotations

from pallas_gpu.lockstep import run

__all__ = ["run"]
