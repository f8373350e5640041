# SPDX-License-Identifier: Apache-2.0
"""Inline code: what its author says in NumPy that it does.

A kernel with code of which nothing is said runs as the code that it is lowered to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.entry import call
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import inline
from pallas_gpu.program.nodes import Op
from pallas_gpu.program.walk import walk


def of_unknown_effect(params: call.CallParams) -> Op | None:
    """Returns an operation that only the code of the kernel can tell what it does."""
    found = [site.op for site in walk(params.jaxpr) if _is_unknown(site.op)]
    ignores = getattr(params.interpret, "inline_mgpu", "error") == "ignore"
    if not ignores:
        return found[0] if found else None
    op = next((op for op in found if op.results), None)
    if op is None:
        return None
    raise errors.NotModelledError(
        f"{_name(op)}: code with results cannot be ignored",
        expected='inline_mgpu="ignore" for code without results, or `emulate`',
        got=f"{len(op.results)} results",
        hint="omit inline_mgpu: the kernel then runs as the code that it is lowered to",
        where=op.where,
    )


def _is_unknown(op: Op) -> bool:
    if op.primitive is inline.inline_mgpu_p:
        return op.params["code"].emulate is None
    return op.primitive is inline.inline_ptx_p and op.params["emulate"] is None


def _name(op: Op) -> str:
    if op.primitive is inline.inline_mgpu_p:
        return op.params["code"].name
    return f"inline_ptx {op.params['template']!r}"


def require_schedules(params: call.CallParams, op: Op) -> None:
    """Raises NotModelledError if orders of code are to be explored."""
    recorder = getattr(params.interpret, "recorder", None)
    if recorder is not None and recorder.explores:
        raise errors.NotModelledError(
            "the orders of emitted code are not explored, and inline code has no model",
            expected="`emulate` for inline code",
            got=_name(op),
            hint="pass emulate=..., which says in NumPy what it does, or check with a "
            "number of orders",
            where=op.where,
        )


def not_modelled(op: Op, error: errors.NotModelledError) -> errors.NotModelledError:
    """Returns the error for code that does not run on the CPU."""
    return errors.NotModelledError(
        f"a kernel with inline code runs as emitted code on a CPU: {error.what}",
        expected="instructions that the machine for emitted code models, or `emulate`",
        got=error.got,
        hint=f"{_name(op)}: pass emulate=..., which says in NumPy what it "
        f"does (inline code at {op.where})",
        where=error.where or op.where,
    )


class Reference:
    """A reference, as `emulate` of inline code is given it.

    A read and a write is one of the elements that its index selects, by the threads
    that execute the code. Both are compared with those of others, as in the kernel.

    Attributes:
      shape: its shape, without transforms.
      dtype: its element type.
    """

    def __init__(self, thread: Warpgroup, region: Region):
        self._thread, self._region = thread, region
        self.shape = tuple(region.shape)
        self.dtype = region.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self._thread.read(self._part(index)))

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._region.memory.read_only:
            raise TypeError(f"{self._region.memory.name} is an input of the kernel")
        part = self._part(index)
        value = np.broadcast_to(np.asarray(value), part.shape)
        self._thread.write(part, value.astype(self.dtype))

    def _part(self, index: Any) -> Region:
        """Returns the elements that integers, slices and `...` select."""
        found = list(index) if isinstance(index, tuple) else [index]
        rest = len(self.shape) - sum(x is not ... for x in found)
        if ... not in found:
            found.append(...)
        at = found.index(...)
        found[at : at + 1] = [slice(None)] * rest
        starts: list[int] = []
        sizes: list[Any] = []
        for x, n in zip(found, self.shape, strict=True):
            if isinstance(x, slice):
                start, stop, step = x.indices(n)
                if step != 1:
                    raise IndexError(f"{x}: steps other than 1 are not supported")
                starts.append(start)
                sizes.append(max(stop - start, 0))
            else:
                starts.append(int(x) + n * (int(x) < 0))
                sizes.append(None)
        return Region(self._region.memory, self._region.place.slice(starts, sizes))


@registry.register(inline.inline_mgpu_p, registry.RuleKind.EMULATE)
def _inline(thread: Warpgroup, operands: Any, code: inline.Code, **_: Any) -> Any:
    if code.emulate is None:
        # `InterpretParams(inline_mgpu="ignore")`: code without results.
        return ()
    given = [_given(thread, x["operand"]) for x in operands]
    args = jax.tree.unflatten(code.given_tree, given)
    returned = _computed(code.name, code.emulate, args)
    leaves = code.leaves(returned, "`emulate`")
    return _results(code.name, leaves, [(x.shape, x.dtype) for x in code.made])


@registry.register(inline.inline_ptx_p, registry.RuleKind.EMULATE)
def _ptx(
    thread: Warpgroup,
    operands: Any,
    template: str,
    shape: tuple[int, ...],
    dtypes: Sequence[Any],
    emulate: Callable[..., Any] | None,
    **_: Any,
) -> Any:
    if emulate is None:
        return ()
    returned = _computed("inline_ptx", emulate, [np.asarray(x) for x in operands])
    leaves = jax.tree.leaves(returned)
    if len(leaves) != len(dtypes):
        raise errors.ArgumentError(
            "inline_ptx: `emulate` returns another number of results than declared",
            expected=f"{len(dtypes)}",
            got=f"{len(leaves)}",
            hint="return an array for each dtype, or None without any",
        )
    return _results("inline_ptx", leaves, [(shape, dtype) for dtype in dtypes])


def _given(thread: Warpgroup, x: Any) -> Any:
    return Reference(thread, x) if isinstance(x, Region) else np.asarray(x)


def _computed(name: str, emulate: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Returns what `emulate` does."""
    try:
        return emulate(*args)
    except errors.PallasGpuError:
        raise
    except Exception as error:
        raise errors.KernelError(
            f"{name}: `emulate` raised an exception",
            expected="results",
            got=f"{type(error).__name__}: {error}",
            hint="it is given arrays of NumPy, and references that are indexed by "
            "integers and slices",
        ) from error


def _results(
    name: str, returned: Sequence[Any], declared: Sequence[tuple[Any, Any]]
) -> Sequence[Any]:
    """Returns the results, of the types that are declared."""
    results = []
    for i, (x, (shape, dtype)) in enumerate(zip(returned, declared, strict=True)):
        array = np.asarray(x)
        if array.shape != shape:
            raise errors.ShapeError(
                f"{name}: result {i} of `emulate` has another shape than declared",
                expected=f"shape {shape}",
                got=f"shape {array.shape}",
                hint="return what the code returns",
            )
        results.append(array.astype(dtype)[()])
    return results
