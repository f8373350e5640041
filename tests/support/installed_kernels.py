# SPDX-License-Identifier: Apache-2.0
"""The kernels that JAX installs for GPUs, with their import lines changed."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
import sys
import types
import warnings

import jax

PLACE = "jax.experimental.pallas.ops.gpu"
_PALLAS = re.compile(
    r"^(?:import jax\.experimental\.pallas(?:\.mosaic_gpu)?"
    r"|from jax\.experimental(?:\.pallas)? import (?:pallas|mosaic_gpu)) as (\w+)$",
    re.MULTILINE,
)
_TRITON = "from jax.experimental.pallas import triton as plgpu"
_SIBLING = re.compile(rf"^from {re.escape(PLACE)} import (\w+)$", re.MULTILINE)
# A CPU does not say how many cores it has, a GPU does.
_CORES = re.compile(r"[\w.]+\(\)(?:\[0\])?\.core_count")


@functools.cache
def ported(name, old="", new=""):
    """Returns a module of upstream's, which uses this package instead of Pallas.

    Args:
      name: the module.
      old: text in it that is replaced by `new`.
    """
    spec = importlib.util.find_spec(f"{PLACE}.{name}")
    text = pathlib.Path(spec.origin).read_text()
    assert old in text
    text = text.replace(old, new)
    text, count = _PALLAS.subn(r"import pallas_gpu as \1", text)
    assert count + text.count(_TRITON) == 2
    text = text.replace(_TRITON, "from pallas_gpu import triton as plgpu")
    if jax.default_backend() == "cpu":
        text = _CORES.sub("4", text)
    siblings = {other: ported(other) for other in _SIBLING.findall(text)}
    module = types.ModuleType(f"ported_{name}")
    sys.modules[module.__name__] = module  # its dataclasses look it up
    vars(module).update(siblings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # those for Triton
        exec(compile(_SIBLING.sub("", text), spec.origin, "exec"), vars(module))
    return module
