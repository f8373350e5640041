# SPDX-License-Identifier: Apache-2.0
"""The public names and their arguments are those of upstream."""

from __future__ import annotations

import inspect

import pytest
from jax._src.tpu_custom_call import OptLevel
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc

_OTHERS = {
    pl: [
        "Indirect", "ds", "get_global", "kernel", "loop", "multiple_of", "num_programs",
        "program_id", "run_scoped", "semaphore_read", "semaphore_signal",
        "semaphore_wait", "when",
    ],
    pltpu: ["async_copy", "emit_pipeline", "make_async_copy", "sync_copy"],
}  # fmt: skip
# Arguments that mean nothing on SparseCores, or that are upstream's alone.
_WITHOUT = {
    ("emit_pipeline", "tiling"), ("emit_pipeline", "core_axis"),
    ("emit_pipeline", "trace_scopes"), ("emit_pipeline", "no_pipelining"),
    ("emit_pipeline", "_explicit_indices"), ("run_scoped", "collective_axes"),
    ("semaphore_signal", "device_id"), ("semaphore_signal", "device_id_type"),
}  # fmt: skip
# Parameters of kernels for TensorCores, and of collectives.
_OF_TENSORCORES = {
    "dimension_semantics", "allow_input_fusion", "vmem_limit_bytes", "collective_id",
    "flags", "internal_scratch_in_bytes", "serialization_format",
    "allow_collective_id_without_custom_barrier", "shape_invariant_numerics",
    "fuse_transposed_lhs_in_matmul",
}  # fmt: skip
# A positional argument, which has another name here.
_RENAMED = {"sem_or_view"}


def _names(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def _upstream():
    found = {
        name: getattr(tpu_sc, name) for name in dir(tpu_sc) if not name.startswith("_")
    }
    for module, names in _OTHERS.items():
        found |= {name: getattr(module, name) for name in names}
    return found


def test_every_name_of_upstream_is_there():
    assert [name for name in _upstream() if not hasattr(plsc, name)] == []


def test_functions_have_the_arguments_of_upstream():
    missing = [
        (name, argument)
        for name, function in _upstream().items()
        if inspect.isfunction(function)
        for argument in _names(function)
        if argument not in _names(getattr(plsc, name))
        and (name, argument) not in _WITHOUT
        and argument not in _RENAMED
    ]
    assert missing == []


def test_classes_have_the_arguments_of_upstream():
    theirs = {
        tpu_sc: ("Indices", "ScalarSubcoreMesh", "VectorSubcoreMesh"),
        pltpu: ("CompilerParams",),
        pl: ("BlockSpec", "Indirect"),
    }
    missing = {
        argument
        for module, names in theirs.items()
        for name in names
        for argument in _names(getattr(module, name))
        if argument not in _names(getattr(plsc, name))
    }
    assert missing == _OF_TENSORCORES


def test_upstreams_name_of_the_tiling():
    params = plsc.CompilerParams
    assert params(use_tc_tiling_on_sc=True) == params() == params(tiling="compact")
    assert params(use_tc_tiling_on_sc=False) == params(tiling="sparsecore")
    with pytest.raises(errors.ArgumentError, match="different tilings"):
        params(use_tc_tiling_on_sc=True, tiling="sparsecore")


@pytest.mark.parametrize("level", [None, OptLevel.O3, "O3"])
def test_upstreams_levels_of_optimization(level):
    assert plsc.CompilerParams(opt_level=level) == plsc.CompilerParams()
