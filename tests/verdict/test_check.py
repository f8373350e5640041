# SPDX-License-Identifier: Apache-2.0
"""`plgpu.check`: all mistakes of a kernel, in several schedules, as an object."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, ops
from pallas_gpu.emulator.engine.pure import arithmetic, by_jax
from pallas_gpu.verdict.verdict import Verdict
from tests.support import everywhere, rings, tiers
from tests.support.mutations.mutant import Mutant, Subject, Switches, Wrong
from tests.support.mutations.subjects import SUBJECTS

F32, F16, I32 = jnp.float32, jnp.float16, jnp.int32
SHAPE = jax.ShapeDtypeStruct((4, 128), F32)


def _name(value: Any) -> str:
    return getattr(value, "__name__", "options")


def shaped(*shape: int, dtype=F16):
    return jax.ShapeDtypeStruct(shape, dtype)


def five_mistakes(x, o, smem, bar):
    plgpu.copy_gmem_to_smem(x.at[0], smem, bar)  # at: copy
    early = smem[...]  # at: early
    plgpu.barrier_wait(bar)
    i = lax.axis_index("i")
    o[i + 2] = smem[...] + early  # at: outside

    @plgpu.loop(0, 3)
    def _(k):
        smem[...] = early * k  # at: store

    plgpu.copy_smem_to_gmem(smem, o.at[0])  # at: copy out
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_wait(bar)  # at: wait


def of_mistakes():
    return plgpu.kernel(
        five_mistakes,
        out_type=SHAPE,
        grid=(4,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((128,), F32), plgpu.Barrier()],
    )


def line(mark: str) -> int:
    with open(__file__) as source:
        (number,) = (
            i for i, x in enumerate(source, 1) if x.endswith(f"# at: {mark}\n")
        )
    return number


LINES = {
    "missing-wait": ("early", "copy"),
    "out-of-bounds": ("outside", None),
    "missing-fence": ("copy out", "store"),
    "race-between-ctas": ("copy out", "copy out"),
    "deadlock": ("wait", None),
}


@pytest.mark.parametrize("wrap", [jax.named_call, jax.jit, jax.vmap], ids=_name)
def test_all_mistakes_of_a_kernel_are_found(wrap):
    x = np.ones((3, *SHAPE.shape) if wrap is jax.vmap else SHAPE.shape, np.float32)
    verdict = plgpu.check(lambda x: wrap(of_mistakes())(x) * 2)(x)
    found = {f.rule.id: (f.at.line, f.other and f.other.line) for f in verdict.findings}
    assert found == {
        rule: (line(at), other and line(other)) for rule, (at, other) in LINES.items()
    }
    assert len(verdict.findings) == len(LINES)


def test_a_finding_has_both_places():
    verdict = plgpu.check(of_mistakes())(SHAPE)
    fence = next(f for f in verdict.findings if f.rule.id == "missing-fence")
    assert fence.at.position == {"device": 0, "cta": {"i": 0}, "warpgroup": 0}
    assert [i for _, i in fence.other.loops] == [0]
    assert fence.buffer == "SMEM float32[128] (smem)"
    assert fence.elements == ((0, 128),)
    dead = next(f for f in verdict.findings if f.rule.id == "deadlock")
    assert dead.barrier == "barrier bar"
    assert dead.schedules == 8


def test_what_nobody_has_written_names_the_first_element():
    def body(o, smem):
        o[0] = smem[4:12] + 0

    out = np.zeros((2, 8), np.float32)
    kernel = everywhere.kernel(body, out, plgpu.SMEM((16,), F32))(None)
    read, result = plgpu.check(kernel)().findings
    assert (read.buffer, read.elements) == ("SMEM float32[16] (smem)", ((4, 5),))
    assert (result.buffer, result.elements) == (
        "output 0 (GMEM float32[2, 8])",
        ((1, 2), (0, 1)),
    )


def test_the_parameters_of_a_finding_repeat_it():
    verdict = plgpu.check(of_mistakes())(SHAPE)
    for found in verdict.findings:
        once = eval(found.reproduce, {"InterpretParams": plgpu.InterpretParams})
        again = plgpu.check(
            of_mistakes(), orders=1, seed=once.seed, asynchrony=once.asynchrony
        )(SHAPE)
        assert found.key in {f.key for f in again.findings}


def finds(verdict: Verdict, subject: Subject, mutant: Mutant) -> bool:
    """True if a verdict has what an ordinary call reports, with its lines."""
    for report in mutant.reports:
        if report.error is Wrong:
            return verdict.clean
        lines = [subject.line(mark) + " " for mark in report.marks]
        for f in verdict.findings:
            text = f"{f.at} {f.other} {f.what} {f.expected} {f.got}"
            named = f.rule.error == report.error.__name__
            if named and all(one in text for one in lines):
                return True
    return False


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_what_a_call_raises_is_among_the_findings(subject):
    for mutant in subject.mutants[: None if tiers.runs_everything() else 1]:
        launch = subject.make(Switches(mutant.name))
        verdict = plgpu.check(launch.call(None), orders=3)(*launch.arguments)
        assert finds(verdict, subject, mutant), f"{mutant.name}: {verdict}"


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_a_correct_kernel_is_clean_and_executed_whole(subject):
    launch = subject.make(Switches())
    verdict = plgpu.check(
        launch.call(None), orders=3 if tiers.runs_everything() else 1
    )(*launch.arguments)
    assert verdict.clean, verdict
    (kernel,) = verdict.coverage
    assert (kernel.executed, kernel.missed) == (kernel.equations, ())


SQUARE = shaped(512, 512)
READY = {
    "ring": (lambda x: rings.ring()(None)(x), [rings.X]),
    "matmul": (
        functools.partial(ops.matmul, config=ops.MatmulConfig(blocks=2)),
        [SQUARE, SQUARE],
    ),
    "matmul on Blackwell": (
        functools.partial(ops.matmul, config=ops.BlackwellMatmulConfig(blocks=2)),
        [SQUARE, SQUARE],
    ),
    "attention": (
        functools.partial(
            ops.attention, config=ops.AttentionConfig(blocks=1, block_kv=64)
        ),
        [shaped(1, 1024, 1, 64)] * 3,
    ),
    "decode": (
        functools.partial(
            ops.decode_attention, config=ops.DecodeConfig(workers=1, stages=2)
        ),
        [shaped(2, 4, 64), *[shaped(2, 1024, 2, 64)] * 2],
    ),
}


@pytest.mark.parametrize("name", READY)
def test_a_ready_kernel_is_clean_and_executed_whole(name):
    fn, args = READY[name]
    verdict = plgpu.check(fn, orders=3)(*args)
    verdict.raise_if_not_clean()
    assert [k.equations - k.executed for k in verdict.coverage] == [0], verdict


def test_functions_choose_kernels_for_the_target():
    matrices = [shaped(128, 128)] * 2
    hopper, blackwell = (
        plgpu.check(ops.matmul, orders=1, target=target)(*matrices).coverage[0].name
        for target in ("sm_90a", "sm_100a")
    )
    assert (hopper, blackwell) == ("split_matmul", "matmul")


def test_each_kernel_of_a_function_is_in_the_verdict():
    double, copy = (
        everywhere.kernel(body, np.zeros(128, np.float32))(None)
        for body in (functools.partial(_scaled, 2.0), functools.partial(_scaled, 1.0))
    )

    @jax.jit
    def fn(x):
        return lax.fori_loop(0, 3, lambda _, x: double(x), copy(x))

    x = np.ones(128, np.float32)
    verdict = plgpu.check(fn, orders=2)(x)
    assert [k.launches for k in verdict.coverage] == [1, 3]
    assert [k.schedules for k in verdict.coverage] == [2, 6]
    np.testing.assert_array_equal(verdict.results, x * 8)


def _scaled(factor, x, o):
    o[...] = x[...] * factor


def test_an_equation_that_no_thread_executes_is_listed():
    def body(x, o):
        o[...] = x[...]

        @plgpu.when(x[0] > 100)
        def _():
            o[...] = x[...] * 3  # at: skipped

    verdict = plgpu.check(everywhere.kernel(body, np.zeros(128, np.float32))(None))(
        np.ones(128, np.float32)
    )
    (kernel,) = verdict.coverage
    assert {missed.at.line for missed in kernel.missed} == {line("skipped")}
    assert "mul" in kernel.missed[0].equations
    assert verdict.clean


def test_what_the_emulator_does_not_model_is_not_clean(monkeypatch):
    known = arithmetic.function
    monkeypatch.setattr(by_jax, "functions", lambda eqn: None)
    monkeypatch.setattr(
        arithmetic, "function", lambda e: None if e.primitive is lax.sin_p else known(e)
    )

    def body(x, o):
        y = jnp.sin(x[...])  # at: first
        o[...] = jnp.sin(y + 1)  # at: second

    kernel = everywhere.kernel(body, np.zeros((4, 128), np.float32))(None)
    verdict = plgpu.check(kernel)(SHAPE)
    assert not verdict.clean
    assert not verdict.findings
    at = [f.at.line for f in verdict.not_modelled]
    assert at == [line("first"), line("second")]
    with pytest.raises(errors.NotModelledError, match="sin"):
        verdict.raise_if_not_clean()


def test_what_a_kernel_cannot_contain_is_not_clean():
    def body(x, o):
        o[...] = jax.pure_callback(lambda x: x, SHAPE, x[...])  # at: callback

    kernel = everywhere.kernel(body, np.zeros((4, 128), np.float32))(None)
    (one,) = plgpu.check(kernel)(SHAPE).not_modelled
    assert (one.rule.id, one.at.line) == ("unsupported", line("callback"))


def test_what_tracing_refuses_is_a_finding():
    def body(x, o):
        o[...] = jnp.broadcast_to(x[9], (4, 128))  # at: refused

    verdict = plgpu.check(
        everywhere.kernel(body, np.zeros((4, 128), np.float32))(None)
    )(SHAPE)
    assert [(f.rule.id, f.at.line) for f in verdict.findings] == [
        ("out-of-bounds", line("refused"))
    ]
    with pytest.raises(errors.KernelError, match="out-of-bounds"):
        verdict.raise_if_not_clean()


def test_integers_that_depend_on_the_schedule_are_found_and_sums_of_floats_are_not():
    def body(x, total, tickets, o):
        i = lax.axis_index("i")
        plgpu.atomic_add(total.at[0], x[i])
        o[i] = plgpu.atomic_add(tickets.at[0], 1)

    kernel = plgpu.kernel(
        body, out_type=shaped(4, dtype=I32), grid=(4,), grid_names=("i",)
    )

    def fn(x):
        total, tickets = jax.new_ref(jnp.zeros(1, F32)), jax.new_ref(jnp.zeros(1, I32))
        return kernel(x, total, tickets), total[...]

    verdict = plgpu.check(fn)(np.array([1e8, 1.0, -1e8, 1.0], np.float32))
    assert {f.rule.id for f in verdict.findings} == {"schedule-dependent"}


def test_what_a_kernel_says_of_its_memory_remains_true():
    def body(x, o):
        o[0] = x[0]

    make = everywhere.kernel(body, np.zeros((4, 128), np.float32))
    accepted = make(plgpu.InterpretParams(partial_results=True, seed=3))
    assert plgpu.check(accepted)(SHAPE).clean
    assert plgpu.check(make(None), partial_results=True)(SHAPE).clean
    assert not plgpu.check(make(plgpu.InterpretParams()))(SHAPE).clean


def test_an_answer_that_has_not_arrived_says_that_there_is_no_work():
    def body(o, answers, barrier):
        o[lax.axis_index("i")] = jnp.zeros(128, F32)
        plgpu.try_cluster_cancel(answers.at[0], barrier)
        (i,), more = plgpu.query_cluster_cancel(answers.at[0], ("i",))
        plgpu.when(more)(lambda: o.__setitem__(i, jnp.zeros(128, F32)))
        plgpu.barrier_wait(barrier)

    verdict = plgpu.check(
        plgpu.kernel(
            body,
            out_type=SHAPE,
            grid=(4,),
            grid_names=("i",),
            scratch_types=[plgpu.TryClusterCancelResult(1), plgpu.Barrier()],
            compiler_params=plgpu.CompilerParams(target="sm_100a"),
        )
    )()
    assert verdict.findings[0].rule.id == "missing-wait"
    assert not verdict.not_modelled


def test_a_livelock_ends_the_check():
    def body(x, o):
        lax.while_loop(lambda i: x[0] > 0, lambda i: i + 1, 0)
        o[...] = x[...]

    kernel = everywhere.kernel(body, np.zeros(128, np.float32))(None)
    verdict = plgpu.check(kernel, max_steps=100)(np.ones(128, np.float32))
    assert [f.rule.id for f in verdict.findings] == ["livelock"]
    assert verdict.coverage[0].schedules == 1


def test_an_ordinary_error_has_the_same_finding():
    with pytest.raises(errors.RaceError) as caught:
        of_mistakes()(np.ones((4, 128), np.float32))
    found, x = caught.value.finding, np.ones((4, 128), np.float32)
    first = plgpu.check(of_mistakes(), orders=1)(x).findings[0]
    same = dataclasses.replace(
        first, kernel=found.kernel, reproduce=found.reproduce, after=found.after
    )
    assert found == same


def test_a_report_names_the_rule_the_places_and_the_schedule():
    verdict = plgpu.check(of_mistakes())(SHAPE)
    text = str(verdict)
    assert text.startswith("5 findings, 1 of them before any other of its run\n1. mis")
    assert f"test_check.py:{line('early')} (five_mistakes), warpgroup 0 of CTA" in text
    assert "iteration 0 of the loop at" in text
    assert "8 schedules show it" in text
    assert "<b>missing-wait</b>" in verdict._repr_html_()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"orders": "some"}, errors.ArgumentError, "all"),
        ({"orders": "all", "seconds": 0}, errors.ArgumentError, "seconds"),
        ({"orders": 0}, errors.ArgumentError, "orders"),
        ({"speed": 1}, TypeError, "speed"),
    ],
    ids=_name,
)
def test_options_are_checked(options, error, text):
    with pytest.raises(error, match=text):
        plgpu.check(of_mistakes(), **options)


def test_a_function_without_a_kernel_is_refused():
    with pytest.raises(errors.ArgumentError, match="does not call a kernel"):
        plgpu.check(lambda x: x + 1)(SHAPE)
