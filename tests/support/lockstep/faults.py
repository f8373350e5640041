# SPDX-License-Identifier: Apache-2.0
"""Emitted modules with a fault put in, for tests that the machine finds it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from tests.support.lockstep import kernels as in_lockstep

Fault = Callable[[ir.Module], None]


def prepared(
    fn: Callable[..., Any], args: Sequence[Any]
) -> Callable[[Fault | None], np.ndarray]:
    """Lowers a function of one kernel; returns what runs its module with a fault."""
    lowered = in_lockstep.lower(fn, args)
    ((equation, kernel),) = lowered._by_equation.items()
    text, context = str(kernel.module), kernel.module.context

    def run_with(fault: Fault | None = None) -> np.ndarray:
        with context, ir.Location.unknown():
            module = ir.Module.parse(text)
            if fault is not None:
                fault(module)
        lowered._by_equation[equation] = dataclasses.replace(kernel, module=module)
        (result,) = lowered.run()
        return result

    return run_with


def run(
    fn: Callable[..., Any], args: Sequence[Any], fault: Fault | None = None
) -> np.ndarray:
    """The result of a function of one kernel, whose module has the fault."""
    return prepared(fn, args)(fault)


def _operations(module: ir.Module, name: str) -> list[ir.Operation]:
    """The operations of a name, or the inline assembly that contains it."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        is_assembly = op.name == "llvm.inline_asm" and name in str(
            op.attributes["asm_string"]
        )
        if op.name == name or is_assembly:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    assert found, f"the module has no {name}"
    return found


def drop(name: str, *which: int) -> Fault:
    """Operations of a name are missing: all of them, or those of some positions."""

    def fault(module: ir.Module) -> None:
        found = _operations(module, name)
        for op in [found[i] for i in which] if which else found:
            op.erase()

    return fault


def edit_text(pattern: str, replacement: str) -> Fault:
    """The text of inline assembly is another; the pattern has to occur."""

    def fault(module: ir.Module) -> None:
        count = 0
        for op in _operations(module, "llvm.inline_asm"):
            text = ir.StringAttr(op.attributes["asm_string"]).value
            changed, n = re.subn(pattern, replacement, text)
            op.attributes["asm_string"] = ir.StringAttr.get(changed)
            count += n
        assert count, f"no assembly matches {pattern}"

    return fault


def drop_text(pattern: str, *which: int) -> Fault:
    """Inline assembly that matches is missing: all of it, or some positions."""

    def fault(module: ir.Module) -> None:
        found = [
            op
            for op in _operations(module, "llvm.inline_asm")
            if re.search(pattern, ir.StringAttr(op.attributes["asm_string"]).value)
        ]
        assert found, f"no assembly matches {pattern}"
        for op in [found[i] for i in which] if which else found:
            op.erase()

    return fault


def edit_operand(
    name: str, position: int, change: Callable[[int], int], *which: int
) -> Fault:
    """A constant operand is another: of all operations of a name, or of some."""

    def fault(module: ir.Module) -> None:
        found = _operations(module, name)
        for op in [found[i] for i in which] if which else found:
            old = op.operands[position]
            value = ir.IntegerAttr(old.owner.attributes["value"]).value
            attribute = ir.IntegerAttr.get(old.type, change(value))
            made = ir.Operation.create(
                "arith.constant",
                results=[old.type],
                attributes={"value": attribute},
                ip=ir.InsertionPoint(op),
            )
            op.operands[position] = made.results[0]

    return fault
