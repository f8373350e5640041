# SPDX-License-Identifier: Apache-2.0
"""Checks of operations that one of the two kinds of subcores has, and of prints."""

from __future__ import annotations

from pallas_gpu import errors
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.debug import debug_print_p
from pallas_gpu.primitives.scoped import run_scoped_p
from pallas_gpu.program.nodes import Op
from pallas_gpu.sparsecore.check.kernel import Kernel
from pallas_gpu.sparsecore.primitives.sync import fetch_and_add_p, subcore_barrier_p
from pallas_gpu.sparsecore.types import MACHINE, Space


@registry.checks(subcore_barrier_p, fetch_and_add_p, machine=MACHINE)
def _check_vector(op: Op, kernel: Kernel) -> None:
    if not kernel.is_vector:
        raise errors.UnsupportedError(
            f"{op.name} on a scalar subcore",
            expected="a kernel with a plsc.VectorSubcoreMesh",
            got="a plsc.ScalarSubcoreMesh",
            hint="scalar subcores of different cores share HBM only",
        )


@registry.checks(run_scoped_p, machine=MACHINE)
def _check_scope(op: Op, kernel: Kernel) -> None:
    for ref in op.made:
        space = ref.aval.memory_space
        if isinstance(space, Space) and not (
            space.on_vector if kernel.is_vector else space.on_scalar
        ):
            raise errors.MemorySpaceError(
                f"{kernel.subcore} has no {space.name}",
                expected="VMEM_SHARED, SMEM and semaphores",
                got=space.describe(ref.aval, ref.shape),
                hint="declare it in a kernel with a plsc.VectorSubcoreMesh",
            )

        own = getattr(ref.aval, "tiling", None)
        if (own, kernel.params.tiling) == ("compact", "sparsecore"):
            raise errors.LayoutError(
                "an array of compact tiling in a kernel with that of SparseCores",
                expected="tiling='sparsecore', or none",
                got=f"{space.describe(ref.aval, ref.shape)}, tiling='compact'",
                hint="make the tiling of the kernel compact, and 'sparsecore' that of "
                "its other scratch",
            )


@registry.checks(debug_print_p, machine=MACHINE)
def _check_print(op: Op, _: Kernel) -> None:
    if len(op.inputs) > 1:
        raise errors.UnsupportedError(
            "debug_print of several values",
            expected="a text, or one scalar, vector or reference",
            got=f"{len(op.inputs)} values",
            hint="print each of them with a debug_print of its own",
        )
