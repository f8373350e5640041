# SPDX-License-Identifier: Apache-2.0
"""The code in README.md runs, in its order, and its links lead somewhere."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import errors
from tools.source_tree import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def run(label: str, namespace: dict[str, Any]) -> None:
    """Runs README's blocks with one label; a failure names the line in README."""
    for match in re.finditer(
        rf"^```{label}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE
    ):
        above = TEXT.count("\n", 0, match.start(1))
        code = compile("\n" * above + match[1], str(ROOT / "README.md"), "exec")
        exec(code, namespace)


@pytest.mark.smoke
def test_the_kernel_of_the_readme_computes_what_it_says():
    names: dict[str, Any] = {}
    run("python", names)
    x = names["x"]
    expected = jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
    np.testing.assert_allclose(names["y"], expected, rtol=1e-6)


def test_the_race_of_the_readme_is_reported_as_it_says():
    names: dict[str, Any] = {}
    run("python", names)
    run("python race", names)
    with pytest.raises(errors.RaceError) as caught:
        names["sum_of_rows"](names["x"])
    quoted = re.search(r"^    RaceError: (.*)\n +got: +(.*) at \S+ (.*)$", TEXT, re.M)
    assert quoted is not None
    assert caught.value.what == quoted[1]
    assert str(caught.value.got).startswith(quoted[2])
    assert str(caught.value.got).endswith(quoted[3])


@pytest.mark.offline
def test_the_kernel_of_the_readme_compiles_without_a_gpu(
    capsys: pytest.CaptureFixture[str],
):
    names: dict[str, Any] = {}
    run("python", names)
    run("python offline", names)
    assert "registers" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "MAP.md"])
def test_links_inside_the_project_lead_somewhere(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [target for target in targets if not (ROOT / target).exists()] == []
