# SPDX-License-Identifier: Apache-2.0
"""The table of features names tests that exist and do what it says of them."""

from __future__ import annotations

import ast
import builtins
import functools

from pallas_gpu import errors
from tests.support import beside, golden
from tests.support.every import every
from tests.support.features import REFUSED, rows
from tests.support.features.refused import OBSOLETE, RULES
from tests.support.features.row import OMISSIONS
from tests.support.mutations.copy_forms import NEEDS
from tests.support.mutations.subjects import SUBJECTS
from tools.coverage_table import filled_registry
from tools.source_tree import ROOT

# The families without rows: arrays, the tensor core, messages.
WITHOUT = {
    *("atomics", "debug", "indexed", "lanes", "multimem", "positions", "registers"),
    *("scheduling", "sorting"),
    *(
        "profiler",
        "mma",
        "operand_copy",
        "scales",
        "sparsity",
        "tcgen05",
        "tmem",
        "wgmma",
    ),
}
ROWS = rows()
MUTANTS = {f"{s.name}: {m.name}": m for s in SUBJECTS for m in s.mutants}
FORMS = {f"{name}: {omission}" for name, omission in NEEDS}


def file_of(name: str):
    folder, _, file = name.partition("::")[0].rpartition("/")
    return ROOT / "tests" / folder / f"test_{file}.py"


@functools.cache
def functions(path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}


def test_named(name: str) -> ast.FunctionDef:
    path = file_of(name)
    assert path.exists(), path
    return functions(path)[f"test_{name.partition('::')[2]}"]


test_named.__test__ = False  # type: ignore[attr-defined]


def names_in(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def reached(name: str) -> set[str]:
    """The names that a test uses, and those that functions of its file use for it."""
    known = functions(file_of(name))
    found, waiting = set(), [test_named(name)]
    while waiting:
        new = names_in(waiting.pop()) - found
        found |= new
        waiting += [known[n] for n in new if n in known]
    return found


@every(ROWS)
def test_a_feature_runs_everywhere(row):
    """In the emulator, in lockstep under both semantics, and on a GPU."""
    assert "everywhere" in reached(row.runs)


@every(ROWS)
def test_its_instruction_is_found_offline(row):
    decorators = test_named(row.offline).decorator_list
    assert "pytest.mark.offline" in map(ast.unparse, decorators)
    text = beside.text_of(file_of(row.offline))
    assert row.instruction in text.replace('"\n    "', "")


@every(ROWS)
def test_the_emulator_reports_what_is_left_out(row):
    for kind, found in row.omissions.items():
        assert kind in OMISSIONS
        if found.startswith("("):
            assert found.endswith(")")
        elif found in FORMS:
            assert found.endswith(kind)
        elif "::" in found:
            text = file_of(found).read_text(encoding="utf-8")
            assert error_texts(found) or "errors." in text
        else:
            reports = MUTANTS[found].reports
            assert all(issubclass(r.error, errors.PallasGpuError) for r in reports)


def error_texts(test):
    """The texts of the errors that a test expects, of all rows of its table."""
    name, texts = test_named(test).name, golden.load(file_of(test).with_suffix(".txt"))
    return [text for row, text in texts.items() if row.partition("[")[0] == name]


def test_every_operation_has_a_row():
    operations = filled_registry().PRIMITIVES
    ours = {name for name, op in operations.items() if op.family not in WITHOUT}
    assert ours == {name for row in ROWS for name in row.operations}


def test_every_asynchronous_operation_says_who_finds_each_omission():
    operations = filled_registry().PRIMITIVES
    for name, operation in operations.items():
        if operation.family in WITHOUT:
            continue
        kinds = {k for r in ROWS if name in r.operations for k in r.omissions}
        assert kinds == set(OMISSIONS) or not operation.asynchronous, name
        assert kinds or not operation.releases, name


def test_every_rule_of_upstream_has_a_row_or_a_reason():
    covered = {rule for row in (*ROWS, *REFUSED) for rule in row.upstream}
    assert covered.isdisjoint(OBSOLETE)
    assert len(covered) + len(OBSOLETE) == RULES


@every(REFUSED)
def test_a_refusal_has_a_class_and_a_test(row):
    error = getattr(errors, row.error, None) or getattr(builtins, row.error)
    assert issubclass(error, errors.PallasGpuError | AttributeError)
    said = error_texts(row.test)
    text = file_of(row.test).read_text(encoding="utf-8")
    if said:
        assert {x.partition(":")[0] for x in said} >= {row.error}
    else:
        assert row.error in text or error is AttributeError


def test_features_have_different_names():
    names = [row.feature for row in (*ROWS, *REFUSED)]
    assert len(names) == len(set(names))
