# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the emulator reports, as a table: bodies named for what is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


class Reports(dict[str, tuple[Any, ...]]):
    """By name: a body, the class of its report, texts in it, and options of its run."""

    def __call__(self, error: Any, *texts: str, **options: Any) -> Callable[[Any], Any]:
        """Returns a decorator that enters a body."""

        def enter(body: Any) -> Any:
            self[body.__name__] = body, error, texts, options
            return body

        return enter

    def check(self, name: str, run: Callable[..., Any], **options: Any) -> None:
        """Runs `run(body, **options)`, which has to raise the report."""
        body, error, texts, own = self[name]
        with pytest.raises(error) as caught:
            run(body, **own, **options)
        for text in texts:
            assert text in str(caught.value), caught.value
