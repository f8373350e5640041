# SPDX-License-Identifier: Apache-2.0
"""Every public name says what it does; what a kernel calls names its PTX and errors."""

from __future__ import annotations

import dataclasses
import inspect
from types import ModuleType

import pytest

import pallas_gpu


def docstring_complaints(package: ModuleType) -> list[str]:
    """One line for every public name of a package that is not described."""
    found = []
    for name in package.__all__:
        value = getattr(package, name)
        if not _can_have_docstring(value):
            continue
        text = inspect.getdoc(value) or ""
        if not text or _is_generated(value, text):
            found.append(f"{name}: no docstring")
        sections = [s for s in _sections(value, package) if s not in text]
        found += [f"{name}: its docstring has no `{s}`" for s in sections if text]
    return found


def _sections(value: object, package: ModuleType) -> list[str]:
    """What the docstring of a public name must contain: sections, and parameters."""
    if inspect.isroutine(value):
        signature = inspect.signature(value)
        wanted = []
        if signature.parameters:
            wanted = ["Args:", *signature.parameters, "Raises:"]
        # A summary such as "Returns the size of …" says it, too.
        wanted += ["Returns"] if _gives(signature) and wanted else []
        if _is_primitive(value, package):
            wanted += ["PTX:", "Since:", "Issued", "Raises:"]
        return list(dict.fromkeys(wanted))
    of_jax = (getattr(value, "__module__", "") or "").startswith("jax.")
    if inspect.isclass(value) and dataclasses.is_dataclass(value) and not of_jax:
        names = [field.name for field in dataclasses.fields(value)]
        checked = [] if "__post_init__" not in vars(value) else ["Raises:"]
        return [*names, *checked]
    return []


def _gives(signature: inspect.Signature) -> bool:
    """Whether a function returns something, as far as its annotation says."""
    empty = inspect.Signature.empty
    return signature.return_annotation not in (empty, None, "None")


def _can_have_docstring(value: object) -> bool:
    # Constants and aliases of types (`SMEM`, a union) show their type's docstring.
    return inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)


def _is_generated(value: object, text: str) -> bool:
    """A dataclass without a docstring gets its signature as one."""
    return inspect.isclass(value) and text.startswith(f"{value.__name__}(")


def _is_primitive(value: object, package: ModuleType) -> bool:
    """Whether a public name is an operation that a kernel calls."""
    module = getattr(value, "__module__", "") or ""
    return inspect.isfunction(value) and module.startswith(
        f"{package.__name__}.primitives"
    )


PACKAGES = [
    pallas_gpu,
    pallas_gpu.ops,
    pallas_gpu.offline,
    pallas_gpu.layouts,
    pallas_gpu.testing,
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_every_public_name_is_described(package):
    assert docstring_complaints(package) == []


def test_the_public_names_are_there_once():
    assert len(pallas_gpu.__all__) == len(set(pallas_gpu.__all__))
    assert [n for n in pallas_gpu.__all__ if not hasattr(pallas_gpu, n)] == []


# A function, its docstring and what is missing in it.
DOCSTRINGS = {
    "nothing is said": ("f()", "", ["no docstring"]),
    "a primitive without PTX": (
        "copy()",
        "Copies. Since: sm_90. Issued by a warp. Raises: ShapeError",
        ["its docstring has no `PTX:`"],
    ),
    "no primitive": ("f()", "Compiles. Raises: CompilationError", []),
    "parameters and results": (
        "f(x, factor) -> int",
        "Multiplies. Args: x: a number. Raises: ArgumentError",
        ["its docstring has no `factor`", "its docstring has no `Returns`"],
    ),
    "errors": ("f(n)", "Stops. Args: n: when.", ["its docstring has no `Raises:`"]),
    "a class without a docstring": ("Spec", "", ["no docstring"]),
    "a field": ("Spec", "A shape.", ["its docstring has no `rows`"]),
}


@pytest.mark.parametrize("case", DOCSTRINGS)
def test_what_a_docstring_lacks_is_found(case):
    signature, text, found = DOCSTRINGS[case]
    name, *parameters = signature.partition("(")
    if any(parameters):
        names: dict = {}
        exec(f"def {signature}: {text!r}", names)
        value = names[name]
    else:
        value = dataclasses.make_dataclass(
            name, [("rows", int)], namespace={"__doc__": text} if text else {}
        )
    value.__module__ = "p.primitives.tma" if name == "copy" else "p"
    package = ModuleType("p")
    package.__all__ = [name]  # type: ignore[attr-defined]
    setattr(package, name, value)
    assert docstring_complaints(package) == [f"{name}: {x}" for x in found]
