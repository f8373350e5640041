# SPDX-License-Identifier: Apache-2.0
"""What an error says to do instead of an operation that kernels do not have."""

from __future__ import annotations

import re

import jax
import jax.extend
import pytest

import pallas_gpu as plgpu
from pallas_gpu.checks.jax_operations import COLLECTIVES, HINTS, LOWERED
from pallas_gpu.entry.plain import REPLACED
from pallas_gpu.primitives import _registry as registry
from tests.support import everywhere
from tests.support.entry_kernels import make, numbers
from tests.support.recipes import RECIPES
from tests.support.refusal import refused_by

SUPPORTED = {
    p.name
    for kind in (registry.RuleKind.EMIT, registry.RuleKind.COMPOSITE)
    for p in registry.rules(kind)
}


def code_of(hint: str) -> list[str]:
    """The code in a hint: what stands in backquotes."""
    return re.findall(r"`([^`]+)`", hint)


def spaceless(text: str) -> str:
    return re.sub(r"\s", "", text)


def test_what_is_known_to_be_lowered_has_rules():
    emitted = {p.name for p in registry.rules(registry.RuleKind.EMIT)}
    assert emitted >= LOWERED


def test_every_operation_of_jax_that_is_not_supported_has_a_hint():
    public = vars(jax.extend.core.primitives).values()
    names = {p.name for p in public if isinstance(p, jax.extend.core.Primitive)}
    known = SUPPORTED | COLLECTIVES | REPLACED | set(HINTS)
    assert sorted(names - known) == []


def test_no_operation_that_is_supported_has_a_hint():
    assert sorted(SUPPORTED & set(HINTS)) == []


@pytest.mark.parametrize("name", HINTS)
def test_the_code_of_a_hint_stands_in_a_recipe(name: str):
    recipes = spaceless("\n".join(recipe.code for recipe in RECIPES.values()))
    names = (f"plgpu.{public}" for public in plgpu.__all__)
    known = {*names, *re.findall(r"\w+_smem|\w+_ref", HINTS[name])}
    missing = [c for c in code_of(HINTS[name]) if spaceless(c) not in recipes]
    assert [c for c in missing if c not in known] == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_computes_what_it_should_and_lowers(name: str):
    recipe = RECIPES[name]
    everywhere.check(
        recipe.make,
        recipe.args,
        list(recipe.expected),
        atol=1e-4,
        semantics=recipe.semantics,
        executed=(),
    )


@refused_by(lambda body: make(body)(numbers()))
def test_a_reference_made_in_a_body_says_what_to_declare(x, o):
    jax.new_ref(x[...])  # HERE


@refused_by(lambda body: make(body)(numbers()))
def test_a_call_of_the_host_says_how_to_see_the_value(x, o):
    jax.debug.callback(print, x[...])  # HERE
