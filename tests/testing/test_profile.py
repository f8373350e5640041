# SPDX-License-Identifier: Apache-2.0
"""`profile`: scopes and waits of a kernel as spans, wherever the kernel runs."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch, compiler, offline
from pallas_gpu.entry import profiling
from pallas_gpu.entry.call import CallParams, kernel_p
from pallas_gpu.testing import profile
from pallas_gpu.types import Recording
from tests.support.refusal import refused
from tests.support.semantics import BOTH

F32 = jnp.float32
SHAPE = (64, 64)
X = np.arange(64 * 64, dtype=np.float32).reshape(SHAPE)
# The emulator, and emitted code under both semantics; the card, too, if there is one.
RUNS = [
    pytest.param((None, BOTH[0]), id="emulator"),
    *(
        pytest.param(("emitted", choice), id=f"emitted-{choice.name}")
        for choice in BOTH
    ),
    *(
        pytest.param((False, choice), id=f"gpu-{choice.name}", marks=pytest.mark.gpu)
        for choice in BOTH
    ),
]


@pytest.fixture(autouse=True)
def on_the_card(request):
    """Kernels of the runs on a GPU are called there."""
    row = getattr(request.node, "callspec", None)
    run = None if row is None else row.params.get("run")
    if run is None or run[0] is not False:
        yield
        return
    with jax.default_device(jax.devices("cuda")[0]):
        yield


everywhere_run = pytest.mark.parametrize("run", RUNS)


def kernel(body, run=(None, BOTH[0]), *, scratch=(), warpgroups=1, out=SHAPE, **more):
    interpret, semantics = run
    if warpgroups > 1:
        more |= {"num_threads": warpgroups, "thread_name": "role"}
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out, F32),
        scratch_types=scratch,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=semantics, **more.pop("params", {})
        ),
        **more,
    )


def spans_of(found, lane=None):
    """(name, depth) of the spans, of all lanes or of one."""
    spans = found.spans if lane is None else found.spans[found.spans["lane"] == lane]
    return [(s["name"], int(s["depth"])) for s in spans]


def roles(x, o, tile, full):
    """A warpgroup copies, both wait and loop."""
    role = lax.axis_index("role")
    with jax.named_scope("all"):

        @plgpu.when(role == 0)
        def _():
            with jax.named_scope("copy"):
                plgpu.copy_gmem_to_smem(x, tile, full.at[1])

        plgpu.barrier_wait(full.at[1])

        @plgpu.loop(0, 3)
        def _(i):
            with jax.named_scope("step"):
                plgpu.delay(100)

    @plgpu.when(role == 1)
    def _():
        o[...] = tile[...] + 1


ROLES = {"scratch": (plgpu.SMEM(SHAPE, F32), plgpu.Barrier(num_barriers=2)),
         "warpgroups": 2}  # fmt: skip


@everywhere_run
@pytest.mark.parametrize("space", [20, None], ids=["given", "automatic"])
def test_scopes_and_waits_are_spans_of_each_warpgroup(run, space):
    found = profile(kernel(roles, run, **ROLES), space=space)(X)
    np.testing.assert_array_equal(found.results, X + 1)
    steps = [("step", 1)] * 3
    first = [("all", 0), ("copy", 1), ("full[1]", 1), *steps]
    assert spans_of(found, 0) == first
    assert spans_of(found, 1) == [("all", 0), ("full[1]", 1), *steps]
    assert set(found.spans["name"][found.spans["is_wait"]]) == {"full[1]"}
    assert found.spans["is_complete"].all() and not found.traces["dropped"].any()
    assert found.has_times is (run[0] is False)


@everywhere_run
def test_times_of_a_warpgroup_nest(run):
    found = profile(kernel(roles, run, **ROLES))(X)
    for lane in range(2):
        (trace,) = found.traces[found.traces["lane"] == lane]
        around, *inner = found.spans[found.spans["lane"] == lane]
        assert trace["begin"] <= around["begin"] < around["end"] <= trace["end"]
        ends = [around["begin"]]
        for span in inner:
            assert ends[-1] <= span["begin"] <= span["end"] <= around["end"]
            ends.append(span["end"])
    # Who waits for a copy is not there before it has started.
    copy, waits = (found.spans[found.spans["name"] == n] for n in ("copy", "full[1]"))
    assert (waits["end"] > copy["begin"]).all()


@everywhere_run
def test_events_without_room_are_dropped_and_counted(run):
    def body(x, o, tile, full):
        plgpu.copy_gmem_to_smem(x, tile, full)
        plgpu.barrier_wait(full)

        @plgpu.loop(0, 20)
        def _(i):
            with jax.named_scope("step"):
                tile[i] = tile[i] + jnp.sum(tile[i])

        o[...] = tile[...]

    scratch = (plgpu.SMEM(SHAPE, F32), plgpu.Barrier())
    found = profile(kernel(body, run, scratch=scratch), space=3, waits=False)(X)
    expected = X.copy()
    expected[:20] += expected[:20].sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(found.results, expected)
    assert spans_of(found) == [("step", 0)] * 3
    assert found.traces["dropped"].tolist() == [34]
    assert "34 events" in str(found)


@everywhere_run
def test_a_span_whose_end_found_no_room_is_not_complete(run):
    found = profile(kernel(roles, run, **ROLES), space=2)(X)
    assert spans_of(found, 1) == [("all", 0), ("full[1]", 1), ("step", 1)]
    assert found.spans["is_complete"][found.spans["lane"] == 1].tolist() == [
        False, True, False,
    ]  # fmt: skip


def in_warps(x, o):
    with jax.named_scope("all"):

        @plgpu.warp_map
        def _(warp):
            @plgpu.when(warp == 2)
            def _():
                with jax.named_scope("third"):
                    plgpu.delay(10)

            with jax.named_scope("each"):
                plgpu.delay(10)

    o[...] = x[...]


@everywhere_run
def test_warps_have_traces_of_their_own(run):
    found = profile(kernel(in_warps, run))(X)
    own = [("all", 0), ("each", 1)]
    lanes = [spans_of(found, lane) for lane in range(4)]
    assert lanes == [own, own, [own[0], ("third", 1), own[1]], own]
    assert "warpgroup 0 warp 2" in str(found)


@everywhere_run
def test_a_warpgroup_records_what_its_first_warp_does(run):
    scope = plgpu.TraceScope.WARPGROUP
    found = profile(kernel(in_warps, run), trace_scope=scope)(X)
    assert spans_of(found) == [("all", 0), ("each", 1)]


@everywhere_run
def test_branches_and_loops_of_any_kind_have_whole_spans(run):
    def body(x, o):
        @plgpu.loop(0, 4)
        def _(i):
            @plgpu.when(lax.rem(i, 2) == 0)
            def _():
                with jax.named_scope("even"):
                    plgpu.delay(10)

        def more(i):
            with jax.named_scope("doubled"):
                plgpu.delay(10)
            return 2 * i

        lax.while_loop(lambda i: i < 8, more, 1)
        with jax.named_scope("again"), jax.named_scope("inner"):
            o[...] = x[...]

    found = profile(kernel(body, run))(X)
    names = [("even", 0)] * 2 + [("doubled", 0)] * 3
    assert spans_of(found) == [*names, ("again", 0), ("inner", 1)]


def test_each_cta_has_its_traces():
    def body(x, o):
        with jax.named_scope("rows"):
            row = pl_rows(lax.axis_index("i"), lax.axis_index("c"))
            o[row] = x[row]

    def pl_rows(i, c):
        return plgpu.ds((2 * i + c) * 16, 16)

    axes = {
        "grid": (2,),
        "grid_names": ("i",),
        "cluster": (2,),
        "cluster_names": ("c",),
    }
    for run in RUNS[:3]:
        found = profile(kernel(body, run.values[0], **axes))(X)
        np.testing.assert_array_equal(found.results, X)
        assert found.traces["cta"].tolist() == [0, 1, 2, 3]
        assert found.spans["cta"].tolist() == [0, 1, 2, 3]


def test_launches_follow_each_other_also_under_jit_and_vmap():
    copy = kernel(lambda x, o: _store(x, o))
    both = jax.jit(lambda x: copy(copy(x)))
    found = profile(both)(X)
    assert [x.kernel for x in found.launches] == [found.launches[0].kernel] * 2
    first, second = (found.traces[found.traces["launch"] == i] for i in range(2))
    assert first["end"] <= second["begin"]
    mapped = profile(jax.vmap(copy))(np.stack([X, X + 1]))
    np.testing.assert_array_equal(mapped.results, np.stack([X, X + 1]))
    assert len(mapped.launches) == 2
    # Called again, the function gives the same; without it no kernel is profiled.
    assert spans_of(profile(both)(X)) == [("store", 0)] * 2
    assert profile(lambda x: x)(X).launches == ()


def _store(x, o):
    with jax.named_scope("store"):
        o[...] = x[...]


@everywhere_run
def test_waits_of_a_pipeline_have_the_names_of_its_blocks(run):
    def body(x, o):
        with jax.named_scope("add"):
            o[...] = x[...] + 1

    interpret, semantics = run
    blocks = plgpu.BlockSpec((16, 64), lambda i: (i, 0))
    f = plgpu.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct(SHAPE, F32), grid=(4,), in_specs=[blocks],
        out_specs=blocks, interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )  # fmt: skip
    found = profile(f)(X)
    np.testing.assert_array_equal(found.results, X + 1)
    assert Counter(found.spans["name"]) == {
        "full of x": 4, "add": 4, "wait_smem_to_gmem": 4,
    }  # fmt: skip


@pytest.mark.parametrize("emitted", [False, True])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_ready_kernels(emitted, target):
    """On Blackwell warps have roles, and the block has tensor memory."""
    a, b = (jnp.asarray(X[:, :64], jnp.bfloat16) % 7 for _ in range(2))
    a, b = jnp.tile(a, (2, 1)), jnp.tile(b, (1, 2))
    params = plgpu.CompilerParams(target=target)
    interpret = plgpu.InterpretParams(emitted=emitted)

    def product(a, b):
        return plgpu.ops.matmul(a, b, compiler_params=params, interpret=interpret)

    found = profile(product)(a, b)
    np.testing.assert_array_equal(found.results, product(a, b))
    waits = {"sm_90a": "full[.]", "sm_100a": "operands.full[.]"}
    assert waits[target] in found.spans["name"]
    assert found.spans["is_complete"].all()


def test_ctas_that_do_not_run_have_no_traces():
    def body(x, o):
        @plgpu.dynamic_scheduling_loop(("i",))
        def _(info):
            (i,) = info.index
            with jax.named_scope("part"):
                row = plgpu.ds(i * 16, 16)
                o[row] = x[row]

    for run in RUNS[:3]:
        grid = {"grid": (4,), "grid_names": ("i",)}
        found = profile(kernel(body, run.values[0], **grid), waits=False)(X)
        assert Counter(found.spans["name"]) == {"part": 4}
        assert 1 <= len(found.traces) <= 4


# --- names ----------------------------------------------------------------------------


def test_names_of_waits():
    def wait_for(barrier):
        plgpu.barrier_wait(barrier)

    waiting = jax.jit(wait_for)

    def body(x, o, tiles, one, several):
        for i in range(2):
            plgpu.copy_gmem_to_smem(x, tiles.at[i], several.at[i])
        plgpu.copy_gmem_to_smem(x, tiles.at[2], one)
        plgpu.barrier_wait(one)

        @plgpu.loop(0, 2)
        def _(i):
            plgpu.barrier_wait(several.at[i])

        plgpu.copy_gmem_to_smem(x, tiles.at[2], one)
        plgpu.copy_gmem_to_smem(x, tiles.at[0], several.at[0])
        waiting(one)
        waiting(several.at[0])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tiles.at[0], o)
        plgpu.wait_smem_to_gmem(0)

    scratch = (
        plgpu.SMEM((3, *SHAPE), F32), plgpu.Barrier(), plgpu.Barrier(num_barriers=2)
    )  # fmt: skip
    found = profile(kernel(body, scratch=scratch))(X)
    either = {"one or several[0]", "one", "several[0]"}
    first, second = (str(n) for n in found.spans["name"][3:5])
    assert found.spans["name"][:3].tolist() == ["one", "several[.]", "several[.]"]
    assert {first, second} <= either
    assert found.spans["name"][5] == "wait_smem_to_gmem"


def test_scopes_that_jax_opens_are_no_spans():
    def body(x, o):
        with jax.named_scope("mine"):
            o[...] = jnp.einsum("ij,jk->ik", x[...], x[...]) + jax.nn.softmax(x[...])

    assert spans_of(profile(kernel(body))(X)) == [("mine", 0)]


def test_scopes_of_functions_count_also_jitted_ones():
    @jax.jit
    def double(x):
        with jax.named_scope("double"):
            return 2 * x

    def body(x, o):
        with jax.named_scope("outer"):
            o[...] = lax.map(double, x[...])

    found = profile(kernel(body))(X)
    np.testing.assert_array_equal(found.results, 2 * X)
    assert spans_of(found) == [("outer", 0), *[("double", 1)] * 64]


# --- code -----------------------------------------------------------------------------


@pytest.mark.parametrize("semantics", BOTH, ids=lambda s: s.name)
def test_scopes_cost_no_instruction_where_nothing_is_profiled(semantics):
    def modules(scopes):
        def body(x, o, tile, full):
            with jax.named_scope("all") if scopes else contextlib.nullcontext():
                plgpu.copy_gmem_to_smem(x, tile, full)
                plgpu.barrier_wait(full)
                o[...] = tile[...] + 1

        scratch = (plgpu.SMEM(SHAPE, F32), plgpu.Barrier())
        return module_of(kernel(body, (None, semantics), scratch=scratch))

    assert modules(True) == modules(False)


def module_of(f):
    closed = jax.make_jaxpr(f)(X)
    (eqn,) = (e for e in closed.eqns if e.primitive is kernel_p)
    build = compiler.lower(CallParams(**eqn.params), arch.DEFAULT_TARGET)
    return str(build.module)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH, ids=lambda s: s.name)
def test_a_mark_reads_the_clock_and_stores_and_the_count_is_a_register(semantics):
    with profiling.REQUESTED(profiling.Request(print)):
        (code,) = offline.compile(kernel(roles, (None, semantics), **ROLES), X)
    assert code.ptx.count("%clock;") >= 10 and "st.global.v2.b32 " in code.ptx
    assert code.resources.stack_bytes == 0
    assert ".local" not in code.ptx


@pytest.mark.parametrize(("blocks", "space"), [(1, 512), (1 << 14, 256), (1 << 24, 16)])
def test_room_for_spans(blocks, space):
    def body(x, o):
        o[...] = x[...]

    f = kernel(body, grid=(blocks,), grid_names=("i",))
    (eqn,) = (e for e in jax.make_jaxpr(f)(X).eqns if e.primitive is kernel_p)
    found = profiling._recording(CallParams(**eqn.params), profiling.Request(print))
    assert found == Recording(space, plgpu.TraceScope.WARPGROUP)


# --- parameters of a kernel -----------------------------------------------------------


def params(folder: Path, **more):
    return {"params": {"profile_space": 8, "profile_dir": str(folder), **more}}


@pytest.mark.parametrize("interpret", [None, "emitted"])
def test_a_kernel_writes_a_file_of_each_call(tmp_path, interpret):
    folder = tmp_path / "new"
    f = kernel(roles, (interpret, BOTH[0]), **ROLES, **params(folder))
    g = jax.jit(lambda x: f(f(x)))
    np.testing.assert_array_equal(g(X), X + 2)
    np.testing.assert_array_equal(f(X), X + 1)
    jax.effects_barrier()
    files = sorted(folder.glob("*-trace.json"))
    assert len(files) == 3
    for file in files:
        events = json.loads(file.read_text())["traceEvents"]
        spans = Counter(e["name"] for e in events if e["ph"] == "X")
        assert spans == {"all": 2, "copy": 1, "step": 6}
        lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert lanes == {"CTA 0 role 0", "CTA 0 role 1"}


def test_a_kernel_that_writes_files_composes(tmp_path):
    f = kernel(lambda x, o: _store(x, o), **params(tmp_path))
    mesh = jax.make_mesh((1,), ("d",))
    rows = jax.P("d")
    sharded = jax.device_put(X, jax.NamedSharding(mesh, rows))

    @jax.custom_vjp
    def copy(x):
        return f(x)

    copy.defvjp(lambda x: (f(x), None), lambda _, g: (f(g),))
    calls = {
        "scan": (3, lambda: lax.scan(lambda c, _: (f(c), None), X, length=3)[0]),
        "grad": (2, lambda: X * jax.grad(lambda x: copy(x).sum())(X)),
        "vmap": (2, lambda: jax.vmap(f)(np.stack([X, X]))[1]),
        "shard_map": (1, lambda: jax.jit(
            jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows)
        )(sharded)),
    }  # fmt: skip
    for name, (launches, call) in calls.items():
        before = len(list(tmp_path.iterdir()))
        np.testing.assert_array_equal(call(), X, name)
        jax.effects_barrier()
        assert len(list(tmp_path.iterdir())) == before + launches, name


def test_waits_of_a_kernel_are_spans_if_it_asks_for_them(tmp_path):
    kernel(roles, **ROLES, **params(tmp_path, profile_waits=True))(X)
    jax.effects_barrier()
    (file,) = tmp_path.iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    assert {e["name"] for e in events if e.get("cat") == "wait"} == {"full[1]"}


def test_warps_of_a_kernel_are_recorded_if_it_asks_for_them(tmp_path):
    scope = plgpu.TraceScope.WARP
    kernel(in_warps, **params(tmp_path, profile_trace_scope=scope))(X)
    jax.effects_barrier()
    (file,) = tmp_path.iterdir()
    assert "warpgroup 0 warp 3" in file.read_text()


def test_a_check_runs_a_kernel_as_it_is(tmp_path):
    f = kernel(roles, **ROLES, **params(tmp_path))
    assert plgpu.check(f)(X).clean
    jax.effects_barrier()
    assert not list(tmp_path.iterdir())


@refused
def test_space_without_a_folder():
    plgpu.CompilerParams(profile_space=8)  # HERE


@refused
def test_a_folder_without_space():
    plgpu.CompilerParams(profile_dir="traces")  # HERE


@refused
def test_a_call_inside_of_jit():
    jax.jit(lambda x: profile(kernel(roles, **ROLES))(x).results)(X)  # HERE
