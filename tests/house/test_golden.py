# SPDX-License-Identifier: Apache-2.0
"""The texts beside the tests: none is left over, and a test fails without its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from pallas_gpu import errors
from tests.support import golden
from tests.support.entry_kernels import run
from tests.support.refusal import refused_by, report

TESTS = Path(__file__).parents[1]
TEXTS = {"test_a[x]": "A\n  b", "test_a[y]": "A\n  b", "test_c": "C\n\n  d"}


def test_each_text_belongs_to_a_test():
    """Of the test files that are collected; a text without a file is always wrong."""
    for path in TESTS.rglob("test_*.txt"):
        assert path.with_suffix(".py").exists(), path
        names = golden.COLLECTED.get(path.with_suffix(".py"))
        assert names is None or set(golden.load(path)) <= set(names), path


def test_what_is_written_is_read(tmp_path):
    golden.write(tmp_path / "test_x.txt", TEXTS)
    assert golden.load(tmp_path / "test_x.txt") == TEXTS
    assert (tmp_path / "test_x.txt").read_text().count("\nA\n") == 1, "they share it"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({}, "`make golden`"),
        ({"test": "A\n  c"}, "-   c\n+   b"),
        ({"test": "A\n  b"}, None),
    ],
)
def test_a_text_that_is_missing_or_differs_fails_and_is_not_written(
    tmp_path, texts, said
):
    path = tmp_path / "test_x.txt"
    golden.write(path, texts)
    written = path.read_text()
    request = Running(tmp_path / "test_x.py", update=False)
    if said is None:
        golden.compare(request, "A\n  b")
    else:
        with pytest.raises(pytest.fail.Exception) as caught:
            golden.compare(request, "A\n  b")
        assert said in str(caught.value)
    assert path.read_text() == written


@pytest.mark.parametrize("args", [["tests"], ["tests/test_x.py::test"]])
def test_make_golden_drops_what_no_test_of_the_whole_file_has(
    tmp_path, monkeypatch, args
):
    file = tmp_path / "test_x.py"
    golden.write(file.with_suffix(".txt"), {"test_gone": "B", "test": "A"})
    monkeypatch.setitem(golden.COLLECTED, file, ["test"])
    golden.compare(Running(file, update=True, args=args), "new")
    rest = {} if args == ["tests"] else {"test_gone": "B"}
    assert golden.load(file.with_suffix(".txt")) == {"test": "new"} | rest


class Running:
    """What `compare` asks of pytest's request."""

    def __init__(self, path, update, args=()):
        self.path, self.args = path, args
        self.node = self.config = self
        self.name = "test"
        self.getoption = {"golden": update}.get


def test_a_report_names_the_marked_line_or_the_source_of_another():
    def marked(x, o):
        o[0] = x[64]  # HERE

    def plain(x, o):
        o[0] = x[65]

    texts = []
    for body in (marked, plain):
        with pytest.raises(errors.OutOfBoundsError) as caught:
            run(body)
        texts.append(report(caught.value, __file__))
    assert texts[0].endswith("marked)") and " test_golden.py:HERE (" in texts[0]
    assert "test_golden.py:`o[0] = x[65]` (" in texts[1]
    assert "test_golden.py:* (" in report(caught.value, "test_other.py")


@pytest.mark.parametrize("row", [64, 0])
def test_a_report_that_names_another_line_or_none_fails(row):
    @refused_by(run)
    def test(x, o, *, row):
        rows = [row]  # HERE
        o[...] = x[...] + x[rows[0]]

    said = "does not name the marked line" if row else "DID NOT RAISE"
    with pytest.raises((AssertionError, pytest.fail.Exception), match=said):
        test(request=None, row=row)
