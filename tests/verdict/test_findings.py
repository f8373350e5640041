# SPDX-License-Identifier: Apache-2.0
"""The table of rules covers the errors that a check can meet."""

from __future__ import annotations

from pallas_gpu import errors, findings


def test_ids_are_unique_and_name_classes_of_errors():
    assert len(findings.BY_ID) == len(findings.RULES)
    assert {rule.error for rule in findings.RULES} <= set(errors.__all__)


def test_each_class_of_mistakes_has_a_rule_of_its_own():
    for name in errors.__all__:
        cls = getattr(errors, name)
        if issubclass(cls, errors.KernelError):
            error = cls.__new__(cls)
            assert findings.rule_of(error).error == name


def test_what_is_not_the_kernels_mistake_is_not_a_finding():
    for cls in (errors.TargetError, errors.NoGpuError, errors.CompilationError):
        assert findings.rule_of(cls("x")).severity == "not modelled"
