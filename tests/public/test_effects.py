# SPDX-License-Identifier: Apache-2.0
"""No argument is accepted without effect, except what its docstring calls a hint.

Every parameter that may be left out has a row, in the table EFFECTS of the test file of
its function or in OTHERS here:

- a list, of two values of the argument of a good call, or of one, compared with none; a
  function makes it of the call's `Env`;
- a function that returns how two calls end that differ in the argument alone;
- the test that shows the effect, of another file with `file::`, or "" for the file;
- `see.HINT`: its docstring calls it a hint;
- `see.Refused`: it accepts its default alone.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, layouts
from tests.support import beside, ops_effects
from tests.support import effects as see
from tests.support import public_calls as calls
from tests.support import public_names as names
from tests.support.every import every
from tests.support.public_calls import F16, F32, OUT, SHAPE, SPEC

ROOT = Path(__file__).parents[2]
CALLABLES = names.public_callables()
SMALL = jax.ShapeDtypeStruct((8, 128), F32)
TILE, SMALL_TILE = plgpu.SMEM(SHAPE, F32), plgpu.SMEM((8, 128), F32)
MEMORY = "tests/emulator/engine/test_memory.py"
IN_FLIGHT = "tests/emulator/engine/test_in_flight.py"
RUN = "tests/emulator/test_run.py"
MBARRIER = "tests/lowering/families/mbarrier"
UNIONS = "tests/memory/test_unions.py"
WORKSPACE = "tests/memory/test_workspace.py"
PEERS = "tests/lowering/families/devices/test_peers.py"
KEPT = "test_arrays_that_are_kept"
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


OTHERS: dict[str, Callable[[], list[str]] | list[Any] | str] = {
    "run_scoped.types": [(TILE,), (SMALL_TILE,)],
    "run_scoped.collective_axes": [(), "other"],
    "offline.compile.target": ["sm_90a", "sm_80"],
    "loop.step": [1, 2],
    "loop.unroll": [1, 2],
    "ds.size": [8, 16],
    "ds.stride": [1, 2],
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
    "as_torch_kernel.inout_argnums": "tests/bridge/test_torch.py::"
    "test_a_function_updates_references",
    **dict.fromkeys(
        ("estimate_cost.args", "estimate_cost.kwargs"),
        "tests/runtime/test_export.py::test_an_estimate_is_upstreams",
    ),
    **{
        f"lower_as_mlir.{name}": "tests/runtime/test_export.py::"
        "test_a_function_is_lowered_for_its_static_arguments_and_platforms"
        for name in ("args", "kwargs", "static_argnames", "platforms")
    },
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
    "check.seconds": "tests/verdict/test_every_order.py",
    "check.target": "tests/verdict/test_check.py",
    "check.options": "tests/verdict/test_check.py",
    "explain.target": "tests/explanation/test_explain.py",
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
    # Control flow
    "loop.init_carry": lambda: loops(plgpu.loop, lower=0, upper=4),
    "loop.num_stages": lambda: bodies(
        lambda e, n: plgpu.loop(0, 4, num_stages=n)(
            lambda i: e.o.__setitem__(i, e.x[i])
        ),
        1,
        2,
    ),
    "dynamic_scheduling_loop.init_carry": lambda: loops(
        plgpu.dynamic_scheduling_loop, grid_names="g", cluster_axes="c"
    ),
    "dynamic_scheduling_loop.roles": "tests/pipeline/test_dynamic.py",
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
    "SMEM.transforms": lambda: see.kernels(
        lambda x, o, s: s.__setitem__(..., jnp.zeros((64, 64), F16)),
        *(
            {"scratch_types": [plgpu.SMEM((64, 64), F16, transforms=t)]}
            for t in ((), calls.SWIZZLED)
        ),
    ),
    **dict.fromkeys(("GMEM.init", "ANY.init"), f"{WORKSPACE}::{INITIAL}"),
    **dict.fromkeys(("GMEM.kept", "ANY.kept"), f"{PEERS}::{KEPT}"),
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
    "CompilerParams.num_stages": "tests/entry/plain/test_choice.py",
    "CompilerParams.persistent": "tests/pipeline/test_persistent.py",
    "CompilerParams.strip": "tests/pipeline/test_persistent.py",
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
    **{
        name: f"tests/testing/test_profile.py::{test}"
        for test, names in {
            "test_a_kernel_writes_a_file_of_each_call": (
                "CompilerParams.profile_space",
                "CompilerParams.profile_dir",
            ),
            "test_warps_of_a_kernel_are_recorded_if_it_asks_for_them": (
                "CompilerParams.profile_trace_scope",
            ),
            "test_waits_of_a_kernel_are_spans_if_it_asks_for_them": (
                "CompilerParams.profile_waits",
            ),
            "test_events_without_room_are_dropped_and_counted": (
                "testing.profile.waits",
            ),
            "test_a_span_whose_end_found_no_room_is_not_complete": (
                "testing.profile.space",
            ),
            "test_a_warpgroup_records_what_its_first_warp_does": (
                "testing.profile.trace_scope",
            ),
        }.items()
        for name in names
    },
    "CompilerParams.profile_bounds_check": see.HINT,
    "CompilerParams.ir_version": "tests/runtime/test_export.py::"
    "test_the_author_may_choose_the_version",
    **{
        f"testing.measure.{name}": "tests/testing/test_measure.py::"
        "test_the_times_of_one_iteration_or_of_each"
        for name in ("aggregate", "iterations")
    },
    "InterpretParams.like_upstream": "tests/emulator/test_like_upstream.py",
    "InterpretParams.emitted": "tests/lockstep/test_interpret.py",
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
    **ops_effects.EFFECTS,
    **{f"ops.{n}.precision": see.HINT for n in ("ragged_dot", "ragged_dot_general")},
    **{f"{n}.cost_estimate": see.HINT for n in ("kernel", "pallas_call")},
    **{f"{n}.metadata": see.HINT for n in ("kernel", "pallas_call")},
    "CostEstimate.remote_bytes_transferred": see.HINT,
    "InterpretParams.logging_mode": see.HINT,
    "InterpretParams.num_cores_or_threads": see.HINT,
    "InterpretParams.num_tma_threads_per_device": see.HINT,
    "BlockSpec.pipeline_mode": see.Refused(1),
    "InterpretParams.on_race": see.Refused("warn"),
    "InterpretParams.skip_floating_point_ops": see.Refused(True),
    "InterpretParams.vector_clock_size": see.Refused(4),
    "lower_as_mlir.device": see.Refused("cuda:0"),
    "lower_as_mlir.dynamic_shapes": see.Refused(True),
    "ops.dot_product_attention.implementation": see.Refused("xla"),
}


def _rows():
    """The rows of all files, with the files of tests that their own file names."""
    rows = beside.merged("EFFECTS", OTHERS)
    for module, table in beside.declared("EFFECTS"):
        file = Path(module.__file__).relative_to(ROOT).as_posix()
        own = {n: e for n, e in table.items() if isinstance(e, str) and "/" not in e}
        rows |= {name: f"{file}::{test}" for name, test in own.items()}
    return rows


EFFECTS = _rows()
SHOWN = [n for n, row in EFFECTS.items() if isinstance(row, list) or callable(row)]
REFUSED = [n for n, row in EFFECTS.items() if isinstance(row, see.Refused)]


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
    assert sorted(optional_parameters()) == sorted(EFFECTS)


@pytest.mark.parametrize("name", SHOWN)
def test_an_argument_has_an_effect(name):
    row = EFFECTS[name]
    one, other = see.argument(name, *row) if isinstance(row, list) else row()
    assert one != other


@every(n for n, e in EFFECTS.items() if isinstance(e, str))
def test_the_test_of_an_effect_exists(name):
    file, _, test = EFFECTS[name].partition("::")
    parameter = name.rpartition(".")[2]
    text = beside.text_of(ROOT / file)
    assert f"def {test}" in text
    assert test or re.search(rf"\b{parameter}\b", text), f"{file} lacks {parameter}"


@every(n for n, row in EFFECTS.items() if row is see.HINT)
def test_a_hint_is_called_one(name):
    owner, _, parameter = name.rpartition(".")
    doc = inspect.getdoc(CALLABLES[owner])
    (text,) = re.findall(rf"^ *[\w, ]*\b{parameter}\b[\w, ]*: (.*)$", doc, re.MULTILINE)
    assert "hint" in text


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused(name):
    owner, _, parameter = name.rpartition(".")
    good = calls.good()[owner]

    def call(env=None):
        arguments = {**good.arguments(env), parameter: EFFECTS[name].value}
        names.call(CALLABLES[owner], arguments)

    with pytest.raises(errors.UnsupportedError, match=parameter):
        if not good.inside:
            return call()
        kernel = calls.kernel(call, blackwell=good.blackwell)
        jax.eval_shape(kernel, OUT)
