# SPDX-License-Identifier: Apache-2.0
"""Tests of errors: the whole report is in the text file beside the test file.

    @refused_by(run)
    def test_a_stride_is_positive(x, o):
        o[...] = x[::-1]  # HERE

A line that ends with `# HERE` is the one that the report has to name. In the text it is
`HERE`; other lines of the test file are their source, and those of other files `*`.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pallas_gpu.errors import PallasGpuError
from tests.support import golden

MARK = "# HERE"
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def refused(test: Callable[..., Any]) -> Callable[..., None]:
    """Expects an error of the test."""
    return _expecting(test, test, list(inspect.signature(test).parameters))


def refused_by(launch: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Expects an error of `launch(body, *args, **options)`: the function is the body.

    Its keyword-only parameters are those of the test.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        def attempt(**row: Any) -> None:
            launch(functools.partial(body, **row) if row else body, *args, **options)

        parameters = inspect.signature(body).parameters.values()
        return _expecting(
            body, attempt, [x.name for x in parameters if x.kind is _KEYWORD]
        )

    return decorate


def in_each(launch: Callable[..., Any], **values: Sequence[Any]) -> Callable[..., Any]:
    """A launch for `refused_by`: with each value of an option, all of which fail.

    Where the reports differ, the others follow the first one in the text.
    """
    ((option, choices),) = values.items()

    def launches(*args: Any, **options: Any) -> None:
        errors: list[Any] = []
        for choice in choices:
            with pytest.raises(PallasGpuError) as caught:
                launch(*args, **options, **{option: choice})
            errors.append(caught.value)
        _, *others = dict.fromkeys(f"{type(x).__name__}: {x}" for x in errors)
        if others:
            errors[0].otherwise = "\n".join(others)
        raise errors[0]

    return launches


def _expecting(
    function: Callable[..., Any], attempt: Callable[..., Any], names: Sequence[str]
) -> Callable[..., None]:
    @functools.wraps(function)
    def test(request: pytest.FixtureRequest, **row: Any) -> None:
        with pytest.raises(PallasGpuError) as caught:
            attempt(**row)
        text = report(caught.value, function.__code__.co_filename)
        if MARK in inspect.getsource(function):
            assert ":HERE" in text, f"it does not name the marked line:\n{text}"
        golden.compare(request, text)

    parameters = [inspect.Parameter(x, _KEYWORD) for x in ["request", *names]]
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    test.has_golden_text = True  # type: ignore[attr-defined]
    return test


def report(error: PallasGpuError, file: str) -> str:
    """Class, text and attributes of an error, without numbers of lines and scopes."""

    def place(match: re.Match[str]) -> str:
        folder, name, number = match.groups()
        if name != os.path.basename(file):
            return f"{name}:{'*' if folder else number}"
        line = linecache.getline(file, int(number)).strip()
        return f"{name}:{'HERE' if line.endswith(MARK) else f'`{line}`'}"

    rows = vars(error).keys() - vars(PallasGpuError("")).keys() - {"__notes__"}
    own = "".join(f"\n  {x + ':':<10} {vars(error)[x]}" for x in sorted(rows))
    text = f"{type(error).__name__}: {error}{own}"
    text = re.sub(r"(?:[\w<>]+\.<locals>\.)+", "", text)
    text = re.sub(r"([\w/.-]*/)?([\w<>-]+\.py):(\d+)", place, text)
    # The place has the line already.
    text = re.sub(rf"\n *[^\n]*{MARK}$", "", text, flags=re.MULTILINE)
    return re.sub(r"(\n  at: .*:`(.*)`.*)\n +\2$", r"\1", text, flags=re.MULTILINE)
