# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch (PTX ISA, griddepcontrol)."""

from __future__ import annotations

from jaxlib.mlir.dialects import llvm


def wait() -> None:
    """Waits until all prerequisite grids have completed and their memory is visible.

    PTX: `griddepcontrol.wait`. Since: sm_90. Any thread issues it, for itself.
    """
    _emit("griddepcontrol.wait;")


def launch_dependents() -> None:
    """Signals that dependent grids may start, as far as this CTA is concerned.

    PTX: `griddepcontrol.launch_dependents`. Since: sm_90. Further ones of the CTA have
    no effect.
    """
    _emit("griddepcontrol.launch_dependents;")


def _emit(text: str) -> None:
    # Accesses to memory must not be moved across.
    llvm.inline_asm(None, [], text, "~{memory}", has_side_effects=True)
