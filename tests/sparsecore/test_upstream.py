# SPDX-License-Identifier: Apache-2.0
"""The public names and their arguments are those of upstream."""

from __future__ import annotations

import inspect

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc

from pallas_gpu import sparsecore as plsc

_OTHERS = {
    pl: [
        "Indirect", "ds", "kernel", "loop", "multiple_of", "num_programs", "program_id",
        "run_scoped", "semaphore_read", "semaphore_signal", "semaphore_wait", "when",
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
