# SPDX-License-Identifier: Apache-2.0
"""No argument is accepted without effect, except what its docstring calls a hint.

Every parameter that may be left out is in one of three tables. `EFFECTS` has calls that
differ in the argument alone and end differently, or names the test that shows the
effect. `HINTS` are called hints in a docstring. `REFUSED` accept their default alone.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, layouts
from tests.support import block_effects, ops_effects, testing_effects
from tests.support import effects as see
from tests.support import public_calls as calls
from tests.support import public_names as names
from tests.support.every import every
from tests.support.public_calls import F16, F32, OUT, SHAPE, SPEC

ROOT = Path(__file__).parents[2]
CALLABLES = names.public_callables()
SMALL = jax.ShapeDtypeStruct((8, 128), F32)
TILE, SMALL_TILE = plgpu.SMEM(SHAPE, F32), plgpu.SMEM((8, 128), F32)
EMIT = "tests/pipeline/test_emit_pipeline.py"
SPECIALIZED = "tests/pipeline/test_warp_specialized.py"
MEMORY = "tests/emulator/engine/test_memory.py"
IN_FLIGHT = "tests/emulator/engine/test_in_flight.py"
RUN = "tests/emulator/test_run.py"
LAUNCH_CONTROL = "tests/lowering/families/grids/test_launch_control.py"
MBARRIER = "tests/lowering/families/mbarrier"
COPIES = "tests/lowering/families/copies"
LEADER = "tests/lowering/families/test_leader_tracked.py"
TENSOR_CORES = "tests/lowering/families/tensor_cores"
UNIONS = "tests/entry/memory/test_unions.py"
WORKSPACE = "tests/entry/memory/test_workspace.py"
INITIAL = "test_scratch_with_initial_contents_has_them_in_every_launch"
K = functools.partial(plgpu.kernel, see.exp, out_type=OUT)
TMEM = layouts.TmemLayout


def shapes(*options):
    """The types of the results of kernels."""
    return see.values(
        lambda **o: jax.eval_shape(plgpu.kernel(calls.nothing, **o), OUT), *options
    )


def wrong_target(target):
    """A kernel of Hopper's tensor core."""
    k = plgpu.kernel(
        see.product, out_type=OUT, **see.PRODUCT, **see.params(target=target)
    )
    return see.outcome(lambda: jax.eval_shape(k, OUT))


def loops(make, **good):
    """Loops without and with a carry."""
    return see.bodies(
        lambda e: make(**good)(calls.nothing),
        lambda e: make(**good, init_carry=e.x[0, 0])(calls.same),
    )


def bodies(use, *values):
    """Kernels whose bodies use values."""
    return see.bodies(*(lambda e, v=v: use(e, v) for v in values))


def options(option, *values, body=calls.nothing, **others):
    """Kernels that differ in one option."""
    return see.kernels(body, *({option: value, **others} for value in values))


def tmem(*options, dtype=F32):
    """Declarations of arrays in TMEM."""
    return see.values(lambda **o: plgpu.TMEM((128, 64), dtype, **o).storage, *options)


def if_first(e):
    """A predicate."""
    return e.i == 0


def signals(*increments):
    """Signals of one semaphore at once."""
    return lambda e: tuple(plgpu.SemaphoreSignal(e.q, inc=n) for n in increments)


STRIDED = [plgpu.Layout.WG_STRIDED(SHAPE, vec_size=n) for n in (1, 4)]
FLOAT_ATOMICS = ("atomic_add", "atomic_max", "atomic_min", "atomic_xchg", "atomic_cas")
INTEGER_ATOMICS = ("atomic_and", "atomic_or", "atomic_xor")
REDUCTIONS = ("max", "min", "prod", "sum")
# The argument of a good call: two values, or one and none; functions get its Env.
VALUES = {
    # Copies, barriers, semaphores
    "copy_gmem_to_smem.barrier": [lambda e: e.b],
    "copy_gmem_to_smem.collective_axes": ["g"],
    "copy_smem_to_gmem.commit_group": [True, False],
    **{
        f"{name}.predicate": [if_first]
        for name in (
            *("copy_gmem_to_smem", "copy_smem_to_gmem"),
            *("async_prefetch", "barrier_arrive"),
        )
    },
    "semaphore_signal.inc": [1, 2],
    "semaphore_signal.memory_scope": ["sys", "gpu"],
    "semaphore_wait.value": [1, 2],
    "semaphore_wait.decrement": [True, False],
    "semaphore_wait.memory_scope": ["sys", "gpu"],
    "semaphore_signal_parallel.signals": [signals(1), signals(1, 1)],
    # Atomic operations
    **{
        f"{name}.mask": [lambda e: e.o[...] > 0, lambda e: e.o[...] > 1]
        for name in FLOAT_ATOMICS
    },
    **{
        f"{name}.mask": [lambda e: e.n[...] > 0, lambda e: e.n[...] > 1]
        for name in INTEGER_ATOMICS
    },
    **{f"{name}.sem": ["acq_rel"] for name in FLOAT_ATOMICS + INTEGER_ATOMICS},
    **{f"{name}.scope": ["sys"] for name in FLOAT_ATOMICS + INTEGER_ATOMICS},
    # Control flow and registers
    "debug_print.args": [(1,), (2,)],
    "run_scoped.types": [(TILE,), (SMALL_TILE,)],
    "run_scoped.collective_axes": [(), "other"],
    "offline.compile.target": ["sm_90a", "sm_80"],
    "loop.step": [1, 2],
    "loop.unroll": [1, 2],
    "ds.size": [8, 16],
    "ds.stride": [1, 2],
    "load.idx": [0, 1],
    "load.layout": STRIDED,
    "load.mask": [lambda e: e.x[...] > 0, lambda e: e.x[...] > 1],
    "store.idx": [plgpu.ds(0, 8), plgpu.ds(8, 8)],
    "store.value": [0.0, 1.0],
    "store.mask": [lambda e: e.x[...] > 0],
    "broadcasted_iota.layout": STRIDED,
    **{f"{name}.axis": [0, 1] for name in REDUCTIONS},
    # Tensor cores
    "wgmma_accumulator_load.wait_n": [0, 1],
    "tcgen05_mma.barrier": [lambda e: e.b],
    "tcgen05_mma.accumulate": [True, False],
    **{
        f"tcgen05_mma.{name}": [lambda e: e.t]
        for name in ("a_scale", "b_scale", "a_sparse_metadata")
    },
    "async_load_tmem.reduce": [None, "max"],
    "async_load_tmem.layout": [TMEM.half_lane(64).tiled],
    # Layouts: values, compared as a whole
    **{
        f"{name}.draw.shape": [(64, 8), (64, 16)] for name in ("layouts", "TiledLayout")
    },
    **{
        f"{name}.draw.part": [(slice(0, 2), slice(0, 4))]
        for name in ("layouts", "TiledLayout")
    },
    "Layout.WG_SPLAT.shape": [(2,)],
    "layouts.WGSplatLayout.shape": [(2,)],
    "Layout.TCGEN05_TMEM_NATIVE.vector_length": [4],
    "Layout.TCGEN05_M64_COLLECTIVE_NATIVE.vector_length": [4],
    **{f"Layout.MMA_{name}.m_warps": [2] for name in ("LHS", "RHS", "ACC")},
    "Layout.MMA_ACC.dtype": [F16, jnp.float64],
    **{
        f"layouts.TmemLayout.{kind}.packing": [2]
        for kind in ("default", "half_lane", "m64_collective")
    },
}
EFFECTS: dict[str, Callable[[], list[str]] | str] = {
    **block_effects.EFFECTS,
    **testing_effects.EFFECTS,
    **{n: functools.partial(see.argument, n, *VALUES[n]) for n in VALUES},
    # Entry points
    "kernel.body": lambda: see.kernels(calls.nothing, {}) + see.kernels(see.exp, {}),
    "kernel.out_type": lambda: shapes({"out_type": OUT}, {"out_type": SMALL}),
    "kernel.out_shape": lambda: shapes({"out_shape": OUT}, {"out_shape": SMALL}),
    "kernel.scratch_types": lambda: see.scratch(TILE, SMALL_TILE),
    "kernel.scratch_shapes": lambda: options("scratch_shapes", [TILE], [SMALL_TILE]),
    "kernel.grid": lambda: options("grid", (1,), (2,), grid_names=("g",)),
    "kernel.grid_names": lambda: options(
        "grid_names", ("g",), ("h",), body=see.at_axis("g"), grid=(2,)
    ),
    "kernel.cluster": lambda: options("cluster", (1,), (2,), cluster_names=("c",)),
    "kernel.cluster_names": lambda: options(
        "cluster_names", ("c",), ("d",), body=see.at_axis("c"), cluster=(2,)
    ),
    "kernel.num_threads": lambda: options("num_threads", 1, 2, thread_name="w"),
    "kernel.thread_name": lambda: options(
        "thread_name", "w", "t", body=see.at_axis("w"), num_threads=2
    ),
    "kernel.mesh": lambda: options(
        "mesh",
        *(plgpu.Mesh(grid=(2,), grid_names=(n,)) for n in "gh"),
        body=see.at_axis("g"),
    ),
    "kernel.compiler_params": lambda: see.kernels(
        see.exp, {}, see.params(approx_math=True)
    ),
    "kernel.interpret": lambda: see.interpreted(K),
    "kernel.debug": lambda: see.printed(K),
    "kernel.name": lambda: options("name", "a", "b"),
    "kernel.kernel_name": lambda: options("kernel_name", "a", "b", name=None),
    **dict.fromkeys(
        ("estimate_cost.args", "estimate_cost.kwargs"),
        "tests/runtime/test_export.py::test_an_estimate_is_upstreams",
    ),
    **{
        f"lower_as_mlir.{name}": "tests/runtime/test_export.py::"
        "test_a_function_is_lowered_for_its_static_arguments_and_platforms"
        for name in ("args", "kwargs", "static_argnames", "platforms")
    },
    "im2col_ref.padding": "tests/lowering/families/copies/test_im2col.py",
    "CompilerParams.debug_checks": "tests/lowering/families/test_debug.py::"
    "test_a_failed_check_prints_its_position_and_traps",
    "run_scoped.kw_types": lambda: bodies(
        lambda e, t: plgpu.run_scoped(lambda tile: None, tile=t), TILE, SMALL_TILE
    ),
    "with_scoped.types": lambda: bodies(
        lambda e, t: plgpu.with_scoped(t)(calls.nothing)(), TILE, SMALL_TILE
    ),
    "with_scoped.kw_types": lambda: bodies(
        lambda e, t: plgpu.with_scoped(tile=t)(lambda tile: None)(), TILE, SMALL_TILE
    ),
    "with_scoped.collective_axes": lambda: bodies(
        lambda e, a: plgpu.with_scoped(TILE, collective_axes=a)(calls.nothing)(),
        (),
        "other",
    ),
    "check.orders": "tests/verdict/test_check.py",
    "check.target": "tests/verdict/test_check.py",
    "check.options": "tests/verdict/test_check.py",
    "force_gpu_interpret_mode.params": "tests/entry/test_interpret.py",
    "set_gpu_interpret_mode.params": "tests/entry/test_interpret.py",
    "offline.compile.args": lambda: (
        see.values(lambda *a: plgpu.offline.compile(lambda *_: 0, *a), {})
        + see.values(lambda: plgpu.offline.compile(lambda: 0, object()), {})
    ),
    "offline.lower.args": lambda: [
        plgpu.offline.lower(K(), x)[0].jaxpr
        for x in (OUT, jax.ShapeDtypeStruct(SHAPE, jnp.int32))
    ],
    "offline.lower.target": lambda: [
        str(plgpu.offline.lower(K(), OUT, target=t)[0].target)
        for t in ("sm_90a", "sm_100a")
    ],
    # Control flow, copies, barriers, registers
    "loop.init_carry": lambda: loops(plgpu.loop, lower=0, upper=4),
    "dynamic_scheduling_loop.init_carry": lambda: loops(
        plgpu.dynamic_scheduling_loop, grid_names="g", cluster_axes="c"
    ),
    "dynamic_scheduling_loop.thread_axis": "tests/pipeline/test_dynamic.py",
    "dynamic_scheduling_loop.cluster_axes": "tests/pipeline/test_dynamic.py",
    "nd_loop.init_carry": lambda: loops(plgpu.nd_loop, grid=(4,), collective_axes="g"),
    "nd_loop.tiling": lambda: bodies(
        lambda e, t: plgpu.nd_loop((4, 4), collective_axes="g", tiling=t)(
            lambda info: e.o.__setitem__(info.index, 1.0)
        ),
        None,
        (2, 2),
    ),
    "find_swizzle.what": lambda: see.values(
        plgpu.find_swizzle, *({"minor_dim_bits": 8, "what": w} for w in ("a", "b"))
    ),
    "barrier_arrive.num_arrivals": f"{MBARRIER}/test_counts.py",
    "barrier_expect.predicate": f"{MBARRIER}/test_counts.py",
    "load.other": lambda: bodies(
        lambda e, n: e.o.set(plgpu.load(e.x, mask=e.x[...] > 0, other=n)), 0.0, 1.0
    ),
    "wait_smem_to_gmem.wait_read_only": lambda: bodies(
        lambda e, r: (plgpu.wait_smem_to_gmem(0, r), e.o.__setitem__((0, 0), 1.0)),
        False,
        True,
    ),
    "copy_gmem_to_smem.implementation": "tests/primitives/test_tma.py",
    "copy_gmem_to_smem.oob_mode": "tests/emulator/gpu/test_tma.py",
    "copy_smem_to_gmem.reduction_op": "tests/lowering/families/test_copy_reductions.py",
    "copy_gmem_to_smem.cache_hint": f"{COPIES}/test_cache_hints.py",
    "copy_smem_to_gmem.cache_hint": f"{COPIES}/test_cache_hints.py",
    **{
        f"{name}.{option}": file
        for name, file in (
            ("copy_gmem_to_smem", LEADER),
            ("async_prefetch", f"{COPIES}/test_prefetch.py"),
        )
        for option in ("leader_tracked", "partitioned_axis")
    },
    "async_prefetch.collective_axes": f"{COPIES}/test_prefetch.py",
    "SemaphoreSignal.inc": lambda: see.argument(
        "semaphore_signal_parallel.signals", signals(1), signals(2)
    ),
    "async_store_smem.atomic": "tests/lowering/families/test_async_stores.py",
    "async_store_smem.sem": "tests/lowering/families/test_async_stores.py",
    "load.optimized": "tests/lowering/test_warpgroup.py",
    **{f"{n}.keepdims": "tests/primitives/test_registers.py" for n in REDUCTIONS},
    "alloc_semaphore.shape": "tests/lowering/families/sync/test_semaphore.py::"
    "test_semaphores_outlive",
    "store.optimized": "tests/lowering/test_parts_of_tiles.py",
    "tcgen05_commit_arrive.predicate": f"{TENSOR_CORES}/test_tcgen05.py",
    "tcgen05_mma.collective_axis": f"{TENSOR_CORES}/test_tcgen05_pairs.py",
    "tcgen05_commit_arrive.collective_axis": f"{TENSOR_CORES}/test_tcgen05_pairs.py",
    "async_copy_scales_to_tmem.collective_axis": f"{TENSOR_CORES}/test_scaled_pairs.py",
    "async_copy_sparse_metadata_to_tmem.collective_axis": (
        f"{TENSOR_CORES}/test_sparse_pairs.py::test_what_is_not_multiplied"
    ),
    "async_copy_smem_to_tmem.collective_axis": (
        f"{TENSOR_CORES}/test_operand_copy.py::test_a_pair_copies_operands"
    ),
    # Declarations
    "TMEM.packed": lambda: tmem({"packed": False}, {"packed": True}, dtype=F16),
    "TMEM.collective": lambda: tmem({}, {"collective": True}),
    "TMEM.layout": lambda: tmem({}, {"layout": TMEM.default(2)}),
    "ACC.dtype": lambda: [str(plgpu.ACC((64, 64), t).to_ref()) for t in (F32, F16)],
    "Barrier.num_arrivals": lambda: see.scratch(
        plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)
    ),
    "Barrier.num_barriers": lambda: see.scratch(
        plgpu.Barrier(), plgpu.Barrier(num_barriers=2)
    ),
    "Barrier.orders_tensor_core": f"{MBARRIER}/test_tensor_core_order.py",
    "ClusterBarrier.orders_tensor_core": f"{MBARRIER}/test_tensor_core_order.py",
    "ClusterBarrier.leader_tracked": f"{MBARRIER}/test_cluster_arrivals.py",
    "Barrier.initially_complete": f"{MBARRIER}/test_initially_complete.py",
    "ClusterBarrier.initially_complete": f"{MBARRIER}/test_initially_complete.py",
    "ClusterBarrier.num_arrivals": "tests/emulator/gpu/test_cluster.py",
    "ClusterBarrier.num_barriers": "tests/emulator/gpu/test_cluster.py",
    "ClusterBarrier.collective_axes": "tests/emulator/gpu/test_cluster.py",
    "try_cluster_cancel.collective_axes": LAUNCH_CONTROL,
    "TryClusterCancelResult.num_buffers": LAUNCH_CONTROL,
    "SMEM.transforms": lambda: see.kernels(
        lambda x, o, s: s.__setitem__(..., jnp.zeros((64, 64), F16)),
        *(
            {"scratch_types": [plgpu.SMEM((64, 64), F16, transforms=t)]}
            for t in ((), calls.SWIZZLED)
        ),
    ),
    **dict.fromkeys(("GMEM.init", "ANY.init"), f"{WORKSPACE}::{INITIAL}"),
    "empty.out_sharding": lambda: see.values(
        lambda **o: plgpu.empty((8,), F32, **o).sharding,
        {},
        {"out_sharding": jax.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P("x"))},
    ),
    "RefUnion.refs": f"{UNIONS}::test_a_union_unpacks_to_its_alternatives",
    **{
        f"Mesh.{field}": "tests/types/test_mesh.py"
        for field in (
            "grid",
            "grid_names",
            "cluster",
            "cluster_names",
            "num_threads",
            "thread_name",
        )
    },
    "Mesh.kernel_name": "tests/entry/test_kernel_mesh.py::test_a_mesh_names_the_kernel",
    "layouts.TmemLayout.packing": lambda: [
        TMEM(layouts.TmemKind.DEFAULT, n).columns((128, 64)) for n in (1, 2)
    ],
    "layouts.TmemLayout.tile_columns": lambda: [
        TMEM(layouts.TmemKind.HALF_LANE, 1, n).tiled for n in (32, 64)
    ],
    # Parameters
    "CompilerParams.approx_math": lambda: see.kernels(
        see.exp, see.params(), see.params(approx_math=True)
    ),
    "CompilerParams.dimension_semantics": lambda: see.block_calls(
        *(
            {"grid": 2, **see.params(dimension_semantics=[s])}
            for s in ("parallel", "arbitrary")
        )
    ),
    "CompilerParams.max_concurrent_steps": lambda: see.block_calls(
        *(
            {
                "grid": 4,
                "in_specs": [SPEC],
                "out_specs": see.WHOLE,
                **see.params(
                    dimension_semantics=["arbitrary"], max_concurrent_steps=steps
                ),
            }
            for steps in (1, 2)
        )
    ),
    "CompilerParams.block_memory_space": "tests/pipeline/test_pallas_call.py::"
    "test_a_block_in_gmem_is_accessed_there",
    **{
        f"triton.dot.{name}": f"tests/bridge/test_triton.py::{test}"
        for name, test in {
            "trans_a": "test_dot_of_transposes",
            "trans_b": "test_dot_of_transposes",
            "allow_tf32": "test_the_precision_of_dot",
            "precision": "test_the_precision_of_dot",
        }.items()
    },
    "CompilerParams.unsafe_no_auto_barriers": lambda: see.kernels(
        see.exchange,
        *(
            {"scratch_types": [TILE], **see.params(unsafe_no_auto_barriers=off)}
            for off in (False, True)
        ),
    ),
    "CompilerParams.reduction_scratch_bytes": "tests/lowering/test_refusals.py",
    "CompilerParams.lowering_semantics": lambda: see.kernels(
        see.two_layouts,
        *(see.params(lowering_semantics=s) for s in plgpu.LoweringSemantics),
    ),
    "CompilerParams.target": lambda: [wrong_target("sm_90a"), wrong_target("sm_100a")],
    "CompilerParams.line_info": "tests/lowering/test_determinism.py::"
    "test_lines_are_kept_only_where_they_are_asked_for",
    "InterpretParams.like_upstream": "tests/emulator/test_like_upstream.py",
    "InterpretParams.seed": f"{RUN}::test_a_seed_repeats_a_run_and_seeds_differ",
    "InterpretParams.max_steps": RUN,
    "InterpretParams.schedules": "tests/types/test_params.py",
    "InterpretParams.detect_races": f"{RUN}::"
    "test_two_ctas_that_write_the_same_element_race",
    "InterpretParams.out_of_bounds_reads": f"{MEMORY}::"
    "test_reads_out_of_bounds_can_be_poison",
    "InterpretParams.uninitialized_memory": f"{MEMORY}::"
    "test_uninitialized_memory_can_be_zero",
    "InterpretParams.asynchrony": f"{IN_FLIGHT}::"
    "test_late_work_waits_until_no_thread_can_run",
    "InterpretParams.partial_results": f"{MEMORY}::"
    "test_results_may_be_partial_on_request",
    # Pipelines
    "emit_pipeline.in_specs": f"{EMIT}::test_the_last_axis_of_the_grid_runs_fastest",
    "emit_pipeline.out_specs": f"{EMIT}::"
    "test_an_output_that_all_steps_share_is_stored_once",
    "emit_pipeline.max_concurrent_steps": f"{EMIT}::"
    "test_delay_release_needs_more_buffers",
    "emit_pipeline.init_carry": f"{EMIT}::test_a_carry_passes_from_step_to_step",
    **{
        f"emit_pipeline_warp_specialized.{name}": f"{SPECIALIZED}::{test}"
        for name, test in {
            "in_specs": "test_one_warpgroup_computes_while_another_copies",
            "out_specs": "test_warpgroups_that_compute_share_the_blocks_of_outputs",
            "max_concurrent_steps": "test_one_warpgroup_computes_while_another_copies",
            "pipeline_state": "test_pipelines_follow_each_other_with_the_same_buffers",
            "manual_produced_barriers": "test_a_body_may_wait_and_release_by_itself",
            "manual_consumed_barriers": "test_a_body_may_wait_and_release_by_itself",
            "compute_context": "test_a_product_carries_through_a_context",
            "memory_thread_idx": "test_any_warpgroup_can_be_the_one_that_copies",
        }.items()
    },
    **ops_effects.EFFECTS,
}

HINTS = (
    *(f"{name}.accumulator_ilp" for name in REDUCTIONS),
    *(f"{name}.optimized" for name in (*FLOAT_ATOMICS[:3], *INTEGER_ATOMICS)),
    "ops.ragged_dot.precision",
    "ops.ragged_dot_general.precision",
    "CostEstimate.remote_bytes_transferred",
    "kernel.cost_estimate",
    "async_store_smem.optimized",
    "InterpretParams.inline_mgpu",
    "InterpretParams.logging_mode",
    "InterpretParams.num_cores_or_threads",
    "InterpretParams.num_tma_threads_per_device",
    "kernel.metadata",
    "pallas_call.cost_estimate",
    "pallas_call.metadata",
)

# What each is given, beside its good call, to be refused.
REFUSED = {
    "BlockSpec.pipeline_mode": 1,
    "InterpretParams.on_race": "warn",
    "InterpretParams.skip_floating_point_ops": True,
    "InterpretParams.vector_clock_size": 4,
    "lower_as_mlir.device": "cuda:0",
    "lower_as_mlir.dynamic_shapes": True,
    "SemaphoreSignal.device_id": 0,
    "semaphore_signal.device_id": 0,
    "ops.dot_product_attention.implementation": "xla",
}


def optional_parameters():
    """The parameters that may be left out, of each callable once."""
    found = []
    for name, fn in CALLABLES.items():
        own = getattr(fn, "__name__", name)
        if own != name and getattr(plgpu, own, None) is fn:
            continue  # another name of the same class or function
        if inspect.isclass(fn) and own != name.rpartition(".")[2]:
            continue
        for parameter in names.parameters(fn).values():
            rest = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if rest or parameter.default is not parameter.empty:
                found.append(f"{name}.{parameter.name}")
    return found


def test_it_is_decided_for_every_parameter_what_it_does():
    assert sorted(optional_parameters()) == sorted((*EFFECTS, *HINTS, *REFUSED))


@pytest.mark.parametrize("name", [n for n, see in EFFECTS.items() if callable(see)])
def test_an_argument_has_an_effect(name):
    one, other = EFFECTS[name]()
    assert one != other


@functools.cache
def text_of(file):
    return (ROOT / file).read_text()


@every(n for n, e in EFFECTS.items() if isinstance(e, str))
def test_the_test_of_an_effect_exists(name):
    file, _, test = EFFECTS[name].partition("::")
    parameter = name.rpartition(".")[2]
    text = text_of(file)
    assert f"def {test}" in text
    assert test or re.search(rf"\b{parameter}\b", text), f"{file} lacks {parameter}"


@every(HINTS)
def test_a_hint_is_called_one(name):
    owner, _, parameter = name.rpartition(".")
    doc = inspect.getdoc(CALLABLES[owner])
    (text,) = re.findall(rf"^ *[\w, ]*\b{parameter}\b[\w, ]*: (.*)$", doc, re.MULTILINE)
    assert "hint" in text


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused(name):
    owner, _, parameter = name.rpartition(".")
    good = calls.GOOD[owner]

    def call(env=None):
        arguments = {**good.arguments(env), parameter: REFUSED[name]}
        names.call(CALLABLES[owner], arguments)

    with pytest.raises(errors.UnsupportedError, match=parameter):
        if not good.inside:
            return call()
        kernel = calls.kernel(call, blackwell=good.blackwell)
        jax.eval_shape(kernel, OUT)
