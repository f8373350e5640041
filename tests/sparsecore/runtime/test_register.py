# SPDX-License-Identifier: Apache-2.0
"""Calls from JAX on TPUs: a custom call with the module, which `jax.export` carries."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from tests.support import tiers
from tests.support.sparsecore.kernels import kernel, lanes, part
from tests.support.sparsecore.modules import CHIPS, needs_libtpu

X = np.zeros((16, 1024), np.float32)


def double(x, **options):
    @plsc.kernel(
        out_type=jax.ShapeDtypeStruct((16, 1024), jnp.float32),
        mesh=plsc.VectorSubcoreMesh(
            core_axis_name="c", subcore_axis_name="s", num_cores=1
        ),
        scratch_types=[plsc.VMEM((1024,), jnp.float32)],
        **options,
    )
    def double(x_ref, o_ref, row):
        lanes = plsc.get_sparse_core_info().num_lanes
        s = jax.lax.axis_index("s")
        plsc.sync_copy(x_ref.at[s], row)

        @plsc.parallel_loop(0, 1024, step=lanes, unroll=8)
        def _(i):
            row[plsc.ds(i, lanes)] = 2 * row[plsc.ds(i, lanes)]

        plsc.sync_copy(row, o_ref.at[s])

    return double(x)


def _exported(function=double, x=X):
    return jax.export.export(jax.jit(function), platforms=["tpu"])(x)


def test_an_exported_program_carries_the_module():
    text = _exported().mlir_module()
    (config,) = re.findall(r'tpu_custom_call.*?backend_config = "(.*?[^\\])"', text)
    for word in ("DEVICE_TYPE_SPARSECORE", "TILING_COMPACT", "serialization_format"):
        assert word in config


@pytest.mark.parametrize(
    "switch",
    ["skip_device_barrier", "disable_bounds_checks", "disable_semaphore_checks"],
)
def test_switches_of_libtpu_are_in_the_call(switch):
    params = plsc.CompilerParams(**{switch: True})
    text = _exported(lambda x: double(x, compiler_params=params)).mlir_module()
    assert switch in text and switch not in _exported().mlir_module()


def test_an_exported_program_survives_its_bytes():
    again = jax.export.deserialize(_exported().serialize())
    assert again.platforms == ("tpu",)
    assert [aval.shape for aval in again.out_avals] == [(16, 1024)]


def test_equal_kernels_have_equal_programs():
    assert _exported().mlir_module() == _exported().mlir_module()


def test_vmap_calls_the_kernel_for_each_instance():
    exported = _exported(jax.vmap(double), np.zeros((3, 16, 1024), np.float32))
    assert [aval.shape for aval in exported.out_avals] == [(3, 16, 1024)]
    assert exported.mlir_module().count("@tpu_custom_call") == 1


def test_the_emulator_is_not_in_a_program_for_tpus():
    with pytest.raises(errors.UnsupportedError, match="cannot be exported"):
        _exported(lambda x: double(x, interpret=True))


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_a_report_has_streams_loops_and_a_bound(chip):
    (report,) = plsc.compile(double, X, target=chip)
    (loop,) = report.code.loops
    assert loop.bundles_per_vector <= 1.25
    text = str(report)
    assert f"kernel double for {chip}" in text
    assert "stream.strided.gather: hbm4b to tilespmem, 4096 B" in text
    assert report.hbm_bytes == 2 * X.nbytes
    of_device = {"v5p": 2.46e12, "v6e": 1.64e12, "tpu7x": 3.7e12}[chip]
    assert report.hbm_seconds == pytest.approx(report.hbm_bytes / of_device)
    assert "module @double" in report.mlir


@needs_libtpu
@pytest.mark.parametrize(
    "store, bundles",
    [
        (lambda ref, value: ref.__setitem__(..., value), 8),
        (plsc.addupdate, 16),
    ],
    ids=["stores", "adds"],
)
def test_a_load_and_an_adding_store_have_one_slot(store, bundles):
    def body(x_ref, o_ref, x, o):
        plsc.sync_copy(x_ref, x)
        plsc.sync_copy(x_ref, o)

        @plsc.parallel_loop(0, 1024, step=lanes(), unroll=8)
        def _(i):
            store(o.at[part(i)], x[part(i)])

        plsc.sync_copy(o, o_ref)

    vector = plsc.VMEM((1024,), jnp.float32)
    for chip in CHIPS if tiers.runs_everything() else CHIPS[-1:]:
        run = kernel(body, X[0], vector, vector, subcores=1, target=chip)
        (report,) = plsc.compile(run, X[0], target=chip)
        (loop,) = report.code.loops
        assert (len(loop.bundles), loop.loads, loop.slot_bound) == (bundles, 8, bundles)


def _gather(table, rows, tiling):
    count, width = rows.shape[0] // 16, table.shape[1]

    @plsc.kernel(
        out_type=jax.ShapeDtypeStruct((rows.shape[0], width), table.dtype),
        mesh=plsc.VectorSubcoreMesh(
            core_axis_name="c", subcore_axis_name="s", num_cores=1
        ),
        scratch_types=[
            plsc.VMEM((count,), jnp.int32),
            plsc.VMEM((count, width), table.dtype),
        ],
        compiler_params=plsc.CompilerParams(tiling=tiling),
    )
    def gather(table_ref, rows_ref, o_ref, rows_vmem, found):
        mine = plsc.ds(jax.lax.axis_index("s") * count, count)
        plsc.sync_copy(rows_ref.at[mine], rows_vmem)
        plsc.sync_copy(table_ref.at[rows_vmem], found)
        plsc.sync_copy(found, o_ref.at[mine])

    return gather(table, rows)


@needs_libtpu
@pytest.mark.parametrize(
    ("tiling", "width", "dtype", "copies"),
    [
        ("compact", 128, jnp.float32, False),
        ("compact", 256, jnp.float32, False),
        ("sparsecore", 128, jnp.float32, False),
        ("sparsecore", 64, jnp.float32, True),
        ("sparsecore", 128, jnp.bfloat16, True),
    ],
)
def test_xla_copies_a_table_to_another_tiling(tiling, width, dtype, copies):
    table, rows = np.zeros((1024, width), dtype), np.zeros(512, np.int32)
    (report,) = plsc.compile(lambda t, r: _gather(t, r, tiling), table, rows)
    assert report.copies_operands == copies
    assert ("XLA copies" in str(report)) == copies
    kinds = [stream.kind for stream in report.code.streams]
    assert any(kind.startswith("stream.indirect") for kind in kinds), kinds


@needs_libtpu
def test_module_and_bundles_are_kept_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("PALLAS_GPU_KEEP", "mlir,bundles")
    monkeypatch.setenv("PALLAS_GPU_DUMP_DIR", str(tmp_path))
    plsc.compile(double, X)
    assert "tpu.enqueue_dma" in (tmp_path / "double.0.mlir").read_text()
    assert "stream.strided.gather" in (tmp_path / "double.0.bundles").read_text()


def test_kernels_are_compiled_for_their_own_machine():
    with pytest.raises(errors.ArgumentError, match="calls a kernel for sparsecore"):
        plsc.compile(jnp.sin, X)
    with pytest.raises(errors.ArgumentError, match="calls kernels for sparsecore"):
        plgpu.offline.compile(double, X)
