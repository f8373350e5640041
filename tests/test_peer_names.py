# SPDX-License-Identifier: Apache-2.0
"""Users of upstream's Pallas can switch: our names take its arguments."""

import inspect

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as upstream

import pallas_gpu as plgpu
from tests.support.every import every
from tools.porting_names import NOT_TAKEN


def shared_names():
    for name in plgpu.__all__:
        theirs = getattr(upstream, name, None) or getattr(pl, name, None)
        if inspect.isfunction(theirs) or inspect.isclass(theirs):
            yield name, getattr(plgpu, name), theirs


def parameters(obj) -> list[str]:
    try:
        signature = inspect.signature(obj)
    except (TypeError, ValueError):
        return []
    return [
        p.name
        for p in signature.parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name[0] != "_"
    ]


@every(shared_names())
def test_a_name_of_upstreams_takes_its_arguments(name, ours, theirs):
    if inspect.isclass(theirs) and issubclass(theirs, __import__("enum").Enum):
        members = [n for n in theirs.__members__ if n[0] != "_"]
        assert [n for n in members if not hasattr(ours, n)] == []
        return
    missing = [
        p
        for p in parameters(theirs)
        if p not in parameters(ours) and (name, p) not in NOT_TAKEN
    ]
    assert not missing


def test_the_test_compares_most_of_the_public_names():
    assert len(list(shared_names())) >= 25
