# SPDX-License-Identifier: Apache-2.0
"""docs/porting.md names everything that upstream has, and says the truth of ours."""

from __future__ import annotations

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu, triton

import pallas_gpu as plgpu
from pallas_gpu.types.foreign import INSTEAD
from tests.support.every import every
from tools.porting_names import (
    OLDER,
    ONLY_IN_0_11,
    ONLY_IN_0_12,
    PL,
    PLGPU,
    TRITON,
    Status,
)
from tools.porting_table import PATH, table

# Names and arguments of the other end of the supported range.
IS_0_11 = jax.__version__.startswith("0.11.")
ABSENT = ONLY_IN_0_12 if IS_0_11 else ONLY_IN_0_11
ROWS = [
    *((plgpu, name, row) for name, row in [*PLGPU.items(), *PL.items()]),
    *((plgpu.triton, name, row) for name, row in TRITON.items()),
]


def test_the_documentation_is_the_table():
    assert PATH.read_text(encoding="utf-8") == table(), "run `make porting-table`"


# Names that upstream's modules give up with a warning: `dir` does not list them.
DEPRECATED = {mosaic_gpu: {"transpose_ref"}, pl: set(), triton: set()}


@pytest.mark.parametrize(
    ("module", "rows"),
    [(mosaic_gpu, PLGPU), (pl, PL), (triton, TRITON)],
    ids=["plgpu", "pl", "triton"],
)
def test_every_public_name_of_upstream_has_a_row(module, rows):
    public = {name for name in dir(module) if not name.startswith("_")}
    # A module inside is a name there once somebody has imported it.
    modules = {name for name in public if inspect.ismodule(getattr(module, name))}
    public -= modules - set(rows)
    public |= DEPRECATED[module]
    assert public <= set(rows)
    assert set(rows) - public <= ABSENT


@every(ROWS)
def test_a_row_says_whether_we_have_the_name(module, name, row):
    has = name in module.__all__
    assert has == (row.status in (Status.SAME, Status.DIFFERS))


@every(ROWS)
def test_a_row_gives_its_differences_or_its_reason(_, name, row):
    assert bool(row.note or row.ours) == (row.status is not Status.SAME)
    assert bool(row.ours) == (row.status is Status.OTHER)


NOT_HERE = [r for r in ROWS if r[2].status not in (Status.SAME, Status.DIFFERS)]
# Primitives, and the host's memory, which nobody names in a kernel.
UNTOLD = {"pallas_call_p", "HOST", "RevisitMode", "CUSTOM_CALL_TARGET_NAME"}


@every(NOT_HERE)
def test_the_error_for_a_name_that_we_lack_says_what_the_table_says(module, name, row):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'") as info:
        getattr(module, name)
    told = str(info.value)
    assert ("; instead: " in told) == (name not in UNTOLD)
    if row.status is Status.LATER:
        assert "not supported yet" in told
    for path in re.findall(r"`(?:plgpu|jax)\.([\w.]+)", row.ours):
        assert path.rpartition(".")[2] in told


def test_names_of_other_languages_say_what_to_write():
    for name in INSTEAD:
        assert name not in plgpu.__all__
        assert not hasattr(plgpu, name)
        for path in re.findall(r"\bplgpu\.([\w.]*\w)", INSTEAD[name]):
            functools.reduce(getattr, path.split("."), plgpu)
        for path in re.findall(r"\bjnp\.([\w.]*\w)", INSTEAD[name]):
            functools.reduce(getattr, path.split("."), jnp)


def test_a_copy_to_another_device_is_replaced_by_one_to_a_peer():
    with pytest.raises(AttributeError, match=r"plgpu\.remote_ref\(ref, device_id\)"):
        _ = plgpu.async_remote_copy


@every([row for _, _, row in ROWS] + [*OLDER.values()])
def test_what_a_row_says_to_write_exists(row):
    for path in re.findall(r"`(?:plgpu|jax)\.([\w.]+)", f"{row.ours} {row.note}"):
        found = jax if f"`jax.{path}" in f"{row.ours} {row.note}" else plgpu
        for part in path.split("."):
            found = getattr(found, part)
