# SPDX-License-Identifier: Apache-2.0
"""Regions of bodies that emit MLIR are spans, wherever the kernel runs."""

from __future__ import annotations

import contextlib
import json
from collections import Counter

import jax
import numpy as np
import pytest
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref

import pallas_gpu as plgpu
from pallas_gpu import arch, compiler
from pallas_gpu import mosaic as mgpu
from pallas_gpu.entry.call import CallParams, kernel_p
from pallas_gpu.testing import profile
from tests.support.mosaic_kernels import kernel, typed
from tests.support.refusal import refused

X = np.arange(128, dtype=np.float32)
THREADS = 256


def index(value):
    return mgpu.c(value, ir.IndexType.get())


def roles(ctx, x_ref, o_ref, scratch):
    """Both warpgroups take three steps; the first one then adds."""
    with ctx.named_region("all"):

        @mgpu.fori(index(3), ())
        def _(i, carry):
            with ctx.named_region("step"):
                mgpu.warpgroup_barrier()
            return carry

        one = mgpu.c(1, ir.IntegerType.get_signless(32))
        second = arith.cmpi(arith.CmpIPredicate.eq, mgpu.warpgroup_idx(), one)
        with mgpu.when(second), ctx.named_region("add"):
            x = mgpu.FragmentedArray.load_strided(x_ref)
            (x + 1.0).store_untiled(o_ref)


def launched(**options):
    return kernel(roles, [X], [X], block=(THREADS, 1, 1), **options)


def spans_of(found, lane):
    spans = found.spans[found.spans["lane"] == lane]
    return [(str(s["name"]), int(s["depth"])) for s in spans]


STEPS = [("all", 0), *[("step", 1)] * 3]


@pytest.mark.parametrize("space", [8, None], ids=["given", "automatic"])
def test_regions_are_spans_of_each_warpgroup(space):
    found = profile(launched(), space=space)(X)
    np.testing.assert_array_equal(found.results[0], X + 1)
    assert spans_of(found, 0) == STEPS
    assert spans_of(found, 1) == [*STEPS, ("add", 1)]
    assert found.spans["is_complete"].all() and not found.traces["dropped"].any()


@pytest.mark.parametrize("scope", [mgpu.ThreadSubset.WARP, plgpu.TraceScope.WARPGROUP])
def test_each_launch_writes_a_file(tmp_path, scope):
    spec = mgpu.ProfilerSpec(3 + 4 * 8, str(tmp_path), trace_scope=scope)
    f = launched(prof_spec=spec)
    np.testing.assert_array_equal(jax.jit(lambda x: f(*f(x)))(X)[0], X + 2)
    f(X)
    jax.effects_barrier()
    traces = 8 if scope == mgpu.ThreadSubset.WARP else 2
    files = sorted(tmp_path.glob("*-trace.json"))
    assert len(files) == 3
    for file in files:
        events = json.loads(file.read_text())["traceEvents"]
        spans = Counter(e["name"] for e in events if e["ph"] == "X")
        assert spans == {"all": traces, "step": 3 * traces, "add": traces // 2}


def test_each_block_of_three_axes_has_its_traces():
    def body(ctx, o_ref, scratch):
        with ctx.named_region("block"):
            at = tuple(gpu.block_id(d) for d in reversed(gpu.Dimension))
            with mgpu.single_thread():
                memref.store(mgpu.thread_idx(), o_ref, at)

    result = np.zeros((4, 3, 2), np.int32)
    found = profile(kernel(body, [], [result], grid=(2, 3, 4), cluster=(2, 1, 1)))()
    assert sorted(found.spans["cta"]) == list(range(24))


def test_what_finds_no_room_is_dropped():
    found = profile(launched(), space=2)(X)
    assert found.traces["dropped"].tolist() == [4, 6]
    np.testing.assert_array_equal(found.results[0], X + 1)


@pytest.mark.parametrize("semantics", plgpu.LoweringSemantics, ids=lambda s: s.name)
def test_regions_of_inline_code_lie_in_the_scopes_around_it(semantics):
    def body(o_ref):
        with jax.named_scope("scope"):

            @plgpu.inline_mgpu()
            def code(ctx):
                with ctx.named_region("region"):
                    mgpu.warpgroup_barrier()

            code()
        with jax.named_scope("store"):
            o_ref[...] = lax.full(X.shape, 1.0)

    f = plgpu.kernel(
        body,
        typed(X),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    assert spans_of(profile(f)(), 0) == [("scope", 0), ("region", 1), ("store", 0)]


# --- code -----------------------------------------------------------------------------


def test_regions_emit_nothing_where_nobody_profiles(monkeypatch):
    def module_of(f):
        (eqn,) = (e for e in jax.make_jaxpr(f)(X).eqns if e.primitive is kernel_p)
        return str(compiler.lower(CallParams(**eqn.params), arch.DEFAULT_TARGET).module)

    with_regions = module_of(launched())
    without = lambda *_: contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(mgpu.LaunchContext, "named_region", without)
    assert with_regions == module_of(launched())


@pytest.mark.offline
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_profiled_kernel_compiles_offline(tmp_path, target):
    spec = mgpu.ProfilerSpec(3 + 4 * 8, str(tmp_path))
    (code,) = plgpu.offline.compile(launched(prof_spec=spec), X, target=target)
    # Each region begins and ends.
    assert code.ptx.count("%clock;") >= 6 and "st.global.v2.b32 " in code.ptx
    assert code.resources.stack_bytes == 0
    (code,) = plgpu.offline.compile(launched(), X, target=target)
    assert "%clock;" not in code.ptx


# --- upstream's names -----------------------------------------------------------------


def test_the_module_of_upstreams_profiler_is_there():
    assert mgpu.profiler.ProfilerSpec is mgpu.ProfilerSpec
    assert mgpu.profiler.measure is plgpu.testing.measure


@refused
def test_a_block_has_no_trace():
    mgpu.ProfilerSpec(16, trace_scope=mgpu.ThreadSubset.BLOCK)  # HERE
