# SPDX-License-Identifier: Apache-2.0
"""A test of all cases of a table names each that fails, and why."""

from __future__ import annotations

import pytest

from tests.support.every import every


def test_every_failure_is_reported_whatever_it_is():
    @every([("one", 1), ("two", 2), ("three", 3), ("four", 4)])
    def check(name, number):
        assert number != 2, "not two"
        if number == 3:
            raise KeyError(name)
        if number == 4:
            with pytest.raises(ValueError):
                pass

    with pytest.raises(pytest.fail.Exception) as caught:
        check()
    text = str(caught.value)
    assert text.startswith("3 of 4 cases:\n")
    assert "one" not in text
    assert "two, 2\n  AssertionError: not two" in text
    assert "three, 3\n  KeyError: 'three'" in text
    assert "four, 4\n  Failed: DID NOT RAISE" in text


def test_cases_without_a_failure_pass():
    seen = []
    every(["a", "b"])(seen.append)()
    assert seen == ["a", "b"]


def test_a_table_has_cases():
    with pytest.raises(AssertionError, match="without cases"):
        every([])
