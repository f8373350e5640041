# SPDX-License-Identifier: Apache-2.0
"""The plugin for pytest: a suite checks the kernels that it calls.

    def test_a_kernel(plgpu_check):
        plgpu_check(f, orders=20)(x)

    @pytest.mark.plgpu_check(orders=3)
    def test_every_kernel_called_here():
        np.testing.assert_allclose(f(x), g(x))

It is beside the package, which imports JAX: a suite that uses neither does not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker."""
    config.addinivalue_line(
        "markers",
        "plgpu_check(orders=8, **options): every kernel of pallas_gpu that the test "
        "calls is checked; the options are those of pallas_gpu.check",
    )


@pytest.fixture
def plgpu_check() -> Callable[..., Any]:
    """`pallas_gpu.check` whose verdicts fail the test unless they are clean."""
    from pallas_gpu.verdict.check import check

    def checked(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        run = check(fn, **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            verdict = run(*args, **kwargs)
            _require_clean(verdict)
            return verdict

        return call

    return checked


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Checks what a marked test calls."""
    marker = pyfuncitem.get_closest_marker("plgpu_check")
    if marker is None:
        return (yield)
    from pallas_gpu.verdict.check import checking, schedules
    from pallas_gpu.verdict.verdict import Verdict

    with checking(*schedules(*marker.args, **marker.kwargs)) as recorder:
        try:
            yield
        except BaseException as error:
            # Results may be wrong for what has been found.
            if not (verdict := Verdict.of(recorder)).clean:
                error.add_note(str(verdict))
            raise
    _require_clean(Verdict.of(recorder))
    return True


def _require_clean(verdict: Any) -> None:
    if not verdict.clean:
        pytest.fail(str(verdict), pytrace=False)
