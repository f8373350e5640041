# SPDX-License-Identifier: Apache-2.0
"""One test for a table whose cases take no time: it reports every case that fails.

Each process of the suite collects every test, which for a comparison of two names takes
longer than the comparison. What runs a kernel is a test for each case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def every(cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Makes a function of a case a test of all cases, as `parametrize` does of each.

    Args:
      cases: the function's argument, or a tuple of its arguments, for each case.
    """
    table = [case if isinstance(case, tuple) else (case,) for case in cases]
    assert table, "a table without cases"

    def of_all(check: Callable[..., None]) -> Callable[[], None]:
        # Not `functools.wraps`: pytest would ask for the arguments of `check`.
        def test() -> None:
            failed = []
            for case in table:
                try:
                    check(*case)
                except (Exception, pytest.fail.Exception) as error:
                    label = ", ".join(map(str, case))[:100]
                    failed.append(f"{label}\n  {type(error).__name__}: {error}")
            if failed:
                text = "\n".join(failed)
                pytest.fail(f"{len(failed)} of {len(table)} cases:\n{text}", False)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__module__, test.__qualname__ = check.__module__, check.__qualname__
        return test

    return of_all
