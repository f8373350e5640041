# SPDX-License-Identifier: Apache-2.0
"""The seam for a machine: a second one goes through the same stages as NVIDIA's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, func, memref

import pallas_gpu as plgpu
from pallas_gpu import _jax, arch, compiler, errors, offline
from pallas_gpu.emitters.module import make_context
from pallas_gpu.emitters.program import passes
from pallas_gpu.lowering import machine
from pallas_gpu.lowering.context import lower_region
from pallas_gpu.program.build import region_of
from tests.support.refusal import refused

F32 = jax.ShapeDtypeStruct((1,), jnp.float32)

# --- a machine without warps, SMEM and grid: one function over words of memory --------


@dataclasses.dataclass(frozen=True)
class AbacusTarget:
    name: str
    words: int
    machine: str = "abacus"
    features: frozenset[str] = frozenset()

    @property
    def budgets(self) -> Mapping[str, int]:
        return {"words": self.words}

    def has(self, feature: str) -> bool:
        return feature in self.features

    def require(self, feature: str, who: str) -> None:
        raise errors.TargetError(f"{who} needs {feature}")


@dataclasses.dataclass(frozen=True)
class Words:
    """The plan: a word for each reference."""

    used: int

    def table(self) -> str:
        return f"words {self.used}"


class Function:
    """The launch: a plain function."""

    def __init__(self, name: str, words: int):
        self._name, self._words = name, words
        self._scopes = contextlib.ExitStack()

    def __enter__(self) -> Function:
        self._scopes.enter_context(make_context())
        self._scopes.enter_context(ir.Location.unknown())
        self.module = ir.Module.create()
        word = ir.MemRefType.get([1], ir.F32Type.get())
        with ir.InsertionPoint(self.module.body):
            function = func.FuncOp(self._name, ([word] * self._words, []))
        self.arguments = list(function.add_entry_block().arguments)
        self._scopes.enter_context(ir.InsertionPoint(function.entry_block))
        return self

    def __exit__(self, kind, value, traceback) -> None:
        self._scopes.close()


@dataclasses.dataclass
class Beads:
    """The state: the rules of the machine, and nothing else."""

    plan: Words
    launch: Function
    keeps_lines: bool = False
    where: Callable[[], str | None] = lambda: None

    @property
    def rules(self) -> Mapping[Any, Callable[..., Any]]:
        return {_jax.get_p: _load, _jax.swap_p: _store, lax.add_p: _add}

    def finished(self, ctx: Any, results: Sequence[Any]) -> Sequence[Any]:
        return results

    def constant(self, value: Any, dtype: Any) -> Any:
        type_ = ir.F32Type.get() if dtype == np.float32 else ir.IndexType.get()
        return arith.constant(type_, value)

    def no_rule(self, op: Any) -> errors.PallasGpuError:
        return errors.UnsupportedError(f"an abacus has no {op.name}")


def _load(ctx, ref, *_):
    return memref.load(ref, [arith.constant(ir.IndexType.get(), 0)])


def _store(ctx, ref, value, *_):
    memref.store(value, ref, [arith.constant(ir.IndexType.get(), 0)])
    return value


def _add(ctx, x, y):
    return arith.addf(x, y)


def plan(build: machine.Build) -> machine.Build:
    params, target = build.params, build.target
    used = len(params.jaxpr.invars)
    if used > target.budgets["words"]:
        raise errors.OutOfResources(
            f"kernel {params.name} needs more words than {target.name} has",
            resource="words",
            limit_bytes=4 * target.budgets["words"],
            used_bytes=4 * used,
        )
    return build.replace(plan=Words(used))


def lower(build: machine.Build) -> machine.Build:
    launch = Function(build.name, build.plan.used)
    with launch:
        state = Beads(build.plan, launch)
        lower_region(state, region_of(build.params.jaxpr), launch.arguments)
        func.return_([])
    return build.replace(module=launch.module)


def share(build: machine.Build) -> machine.Build:
    return build.replace(module=passes.share_subexpressions(build.module))


@pytest.fixture
def abacus(monkeypatch) -> AbacusTarget:
    monkeypatch.setattr(machine, "_MACHINES", dict(machine._MACHINES))
    machine.register_machine("abacus", plan=plan, rules=lower, cse=share)
    return AbacusTarget("abacus3", words=3)


def sum_of_words(x_ref, y_ref, o_ref):
    o_ref[0] = x_ref[0] + y_ref[0] + (x_ref[0] + y_ref[0]) + 2.0


def kernel(body, inputs=2):
    return plgpu.kernel(body, out_type=F32, name="beads"), [F32] * inputs


def test_a_second_machine_lowers_through_the_stages(abacus):
    f, args = kernel(sum_of_words)
    (params,) = offline.kernels_called(f, args, arch.SM_90A)
    texts = {}
    build = compiler.lower(params, abacus, lambda n, _, text: texts.update({n: text()}))
    text = str(build.module)
    assert "func.func @beads(%arg0: memref<1xf32>" in text
    assert "gpu." not in text
    # Its stage has run, and NVIDIA's have not: x + y is computed once.
    assert texts["rules"].count("arith.addf") == 4
    assert text.count("arith.addf") == 3
    assert texts["plan"] == "words 3"
    assert texts["layouts"] is texts["annotated"] is None
    assert texts["mlir"] == text


@refused
def test_the_planner_of_a_second_machine_keeps_to_its_budget(abacus):
    f, args = kernel(lambda x, y, z, o: o.__setitem__(0, x[0]), inputs=3)
    offline.lower(f, *args, target=abacus)


@refused
def test_a_second_machine_refuses_what_it_has_no_rule_for(abacus):
    def body(x, y, o):
        o[0] = jnp.sin(x[0])  # HERE

    f, args = kernel(body)
    offline.lower(f, *args, target=abacus)


@refused
def test_a_target_of_no_machine_is_refused(monkeypatch):
    nvidia = machine._MACHINES["nvidia"]
    monkeypatch.setattr(machine, "_MACHINES", {"nvidia": nvidia})
    f, args = kernel(sum_of_words)
    offline.lower(f, *args, target=AbacusTarget("abacus3", words=3))


@refused
def test_two_machines_of_one_name_are_refused(abacus):
    machine.register_machine("abacus", plan=plan, rules=lower, cse=share)
