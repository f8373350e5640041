# SPDX-License-Identifier: Apache-2.0
"""Instructions that one thread issues for its warpgroup, or for its warp."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu.emitters import module
from pallas_gpu.emitters.control import predicated


@contextlib.contextmanager
def thread() -> Iterator[ir.Value | None]:
    """A context for what the elected thread issues; yields the instructions' predicate.

    A block of one warpgroup multiplies in the loops in which it copies. A branch of one
    thread diverges, and ptxas keeps no values in uniform registers across a loop that
    contains such a branch, descriptors of wgmma among them: a ragged product took 1.16
    times as long (H200). So its warp executes the code, and the predicate selects the
    thread. Other blocks have a warpgroup that copies: the predicate is None, and the
    thread branches; gradients of attention with heads of 64 took 1.02 times as long
    with predicates there.
    """
    kernel, predicate = module.current(), None
    condition = kernel.elected
    if kernel.issuer == "warpgroup" and kernel.spec.warpgroups == 1:
        equal = arith.CmpIPredicate.eq
        condition = arith.cmpi(equal, kernel.threads.warp, kernel.i32(0))
        predicate = kernel.threads.warp_elected
    with predicated(condition):
        yield predicate


def instruction(
    text: str,
    operands: Sequence[ir.Value],
    constraints: Sequence[str],
    by: ir.Value | None = None,
) -> None:
    """Emits an instruction on memory without a result.

    Args:
      text: PTX without its semicolon, `$0` the first operand.
      operands, constraints: one for each of them, as of inline assembly.
      by: i1, the predicate of the threads that issue it; None is all.
    """
    if by is not None:
        text = f"@${len(operands)} {text}"
        operands, constraints = [*operands, by], [*constraints, "b"]
    joined = ",".join([*constraints, "~{memory}"])
    llvm.inline_asm(None, operands, f"{text};", joined, has_side_effects=True)
