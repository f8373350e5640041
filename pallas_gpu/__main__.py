# SPDX-License-Identifier: Apache-2.0
"""The command line: checks, explains or compiles kernels, without a GPU.

    python -m pallas_gpu check module:function --shapes f16[512,256],f16[256,256]
    python -m pallas_gpu explain module:function --shapes f16[512,256] --json
    python -m pallas_gpu compile module:function --shapes f32[1024] --target sm_100a

The exit status of `check` is 0 for a clean verdict, 1 for findings, 2 if there are none
and not everything could be judged, 3 if there is no verdict. That of `explain` is 0 if
nothing is slow, 1 if something is, 2 if registers and spills are not known because no
compiler is installed. That of `compile` is 0. Errors of kernels have the same status in
both: 1 for a mistake, 2 for what is not supported.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from pallas_gpu import errors, offline
from pallas_gpu.explanation.explain import explain
from pallas_gpu.verdict.check import check

_SHAPE = re.compile(r"\s*(\w+)\[([\d,\s]*)\]\s*")
_SHORT = re.compile(r"(bf|f|i|s|u|c)(\d+)")
_KINDS = {"bf": "bfloat", "f": "float", "i": "int", "s": "int", "u": "uint",
          "c": "complex"}  # fmt: skip
CLEAN, FINDINGS, NOT_MODELLED, FAILED = range(4)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(FAILED, f"{self.prog}: error: {message}\n")


def function(text: str) -> Callable[..., Any]:
    """Returns the function `module:name` or `file.py:name`; `name` may have dots."""
    module, _, name = text.rpartition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError("expected module:function")
    first, *rest = name.split(".")
    if module.endswith(".py"):
        found = runpy.run_path(module)[first]
    else:
        found = getattr(importlib.import_module(module), first)
    for part in rest:
        found = getattr(found, part)
    return found


def shapes(text: str) -> list[jax.ShapeDtypeStruct]:
    """Returns the arrays of a list such as `f16[512,256],int32[]`."""
    found, end = [], 0
    for match in _SHAPE.finditer(text):
        if text[end : match.start()] != ("," if end else ""):
            break
        dims = tuple(int(n) for n in match[2].split(",") if n.strip())
        found.append(jax.ShapeDtypeStruct(dims, _dtype(match[1])))
        end = match.end()
    if end != len(text) or not found:
        raise argparse.ArgumentTypeError("expected a list such as f16[512,256],i32[8]")
    return found


def _dtype(name: str) -> Any:
    short = _SHORT.fullmatch(name)
    if short is not None:
        name = _KINDS[short[1]] + short[2]
    try:
        return jnp.dtype(name)
    except TypeError:
        raise argparse.ArgumentTypeError(f"{name} is not the name of a dtype") from None


def _parser() -> _Parser:
    parser = _Parser("python -m pallas_gpu", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    checking = commands.add_parser("check", help="run kernels in several schedules")
    checking.add_argument(
        "--orders", default=8, type=_orders, help="how many schedules, or all"
    )
    checking.add_argument("--seed", default=0, type=int, help="of the first schedule")
    checking.add_argument("--seconds", default=60.0, type=float,
                          help="how long a launch is run in all orders")  # fmt: skip
    checking.add_argument("--emitted", action="store_true",
                          help="check what kernels are lowered to")  # fmt: skip
    explaining = commands.add_parser("explain", help="say why kernels are slow")
    compiling = commands.add_parser("compile", help="report a kernel's resources")
    for each, run, target in (
        (checking, _check, None),
        (explaining, _explain, "sm_90a"),
        (compiling, _compile, "sm_90a"),
    ):
        each.add_argument("--target", default=target, help="such as sm_100a")
        each.add_argument("function", help="module:function, or file.py:function")
        each.add_argument("--shapes", type=shapes, required=True,
                          help="of the arguments: f16[512,256],i32[8]")  # fmt: skip
        each.add_argument("--json", action="store_true", help="print JSON")
        each.set_defaults(run=run)
    return parser


def _orders(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _check(options: argparse.Namespace) -> int:
    run = check(
        function(options.function),
        orders=options.orders,
        seconds=options.seconds,
        target=options.target,
        seed=options.seed,
        emitted=options.emitted,
    )
    verdict = run(*options.shapes)
    print(verdict.to_json() if options.json else verdict)
    if verdict.findings:
        return FINDINGS
    return CLEAN if verdict.clean else NOT_MODELLED


def _explain(options: argparse.Namespace) -> int:
    run = explain(function(options.function), target=options.target)
    found = run(*options.shapes)
    print(found.to_json() if options.json else found)
    if found.slow:
        return FINDINGS
    return CLEAN if found.is_complete else NOT_MODELLED


def _compile(options: argparse.Namespace) -> int:
    fn = function(options.function)
    reports = offline.compile(fn, *options.shapes, target=options.target)
    if options.json:
        rows = [{"name": report.name} | dataclasses.asdict(report.resources)
                for report in reports]  # fmt: skip
        print(json.dumps(rows, indent=2))
    else:
        print(*reports, sep="\n")
    return CLEAN


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except errors.PallasGpuError as error:
        print(error, file=sys.stderr)
        is_mistake = isinstance(error, errors.KernelError)
        if options.command == "check":
            return FAILED
        return FINDINGS if is_mistake else NOT_MODELLED
    except Exception:
        # Python's own status would be that of findings.
        traceback.print_exc()
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
