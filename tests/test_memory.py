# SPDX-License-Identifier: Apache-2.0
"""What stays in memory when a kernel is gone: no object of the package, and no cycle.

A cycle stays until Python's garbage collector visits it, which counts objects: it does
not see that a dozen of them hold megabytes of arrays or of MLIR.
"""

from __future__ import annotations

import collections
import gc
import itertools
import sys
import threading
import tracemalloc
from pathlib import Path
from types import CodeType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.emulator.engine import plan
from tests.support import everywhere

_SHAPE = (64, 128)
_X = np.ones(_SHAPE, np.float32)
_PACKAGE = Path(plgpu.__file__).parent
_KINDS = ("pallas_gpu.", "tests.support.", "jax._src.core.Jaxpr")


def make(number):
    """Returns what makes a kernel that differs from all others."""

    def body(x, o, buffer, barrier):
        plgpu.copy_gmem_to_smem(x, buffer, barrier)
        plgpu.barrier_wait(barrier)

        @plgpu.loop(0, 2)
        def _(i):
            value = buffer[...]
            o[...] = value * float(number) + jnp.max(value, axis=1, keepdims=True)

    return lambda interpret: plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(_SHAPE, jnp.float32),
        scratch_types=[plgpu.SMEM(_SHAPE, jnp.float32), plgpu.Barrier()],
        interpret=interpret,
    )


USES = {
    "emulated": lambda kernel, n: kernel(None)(_X),
    "jitted": lambda kernel, n: jax.jit(kernel(None))(_X).block_until_ready(),
    "batched": lambda kernel, n: jax.vmap(kernel(None))(np.stack([_X, _X])),
    "lowered": lambda kernel, n: plgpu.offline.lower(kernel(None), _X),
    "in lockstep": lambda kernel, n: everywhere.check(kernel, (_X,), _X * (n + 1)),
}


def count(objects):
    """Counts those of the package, of the tests' support and of traces, by type."""
    names = (f"{type(x).__module__}.{type(x).__name__}" for x in objects)
    return collections.Counter(name for name in names if name.startswith(_KINDS))


@pytest.fixture
def unreachable():
    """Returns the objects that only the garbage collector could free.

    What JAX frees when the collector runs is not among them.
    """
    gc.disable()

    def collected():
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return gc.garbage

    yield collected
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("use", USES)
def test_a_kernel_that_is_gone_leaves_neither_cycles_nor_objects(use, unreachable):
    def run(numbers):
        for number in numbers:
            USES[use](make(number), number)

    run([1000, 1001])  # what is kept once, for all kernels
    gc.collect()
    before = count(gc.get_objects())
    run([1002, 1003, 1004])
    assert count(unreachable()) == {}
    assert count(gc.get_objects()) - before == {}


def test_no_function_of_the_package_refers_to_itself_through_a_closure():
    found = []
    for path in sorted(_PACKAGE.rglob("*.py")):
        rest = [compile(path.read_text(), str(path), "exec", dont_inherit=True)]
        while rest:
            outer = rest.pop()
            inner = [x for x in outer.co_consts if isinstance(x, CodeType)]
            rest += inner
            found += [
                f"{path.relative_to(_PACKAGE)}:{code.co_firstlineno} {code.co_name}"
                for code in inner
                if code.co_name in _reached(code, inner)
            ]
    assert found == []


def _reached(code, siblings):
    """The local functions that one of them holds, also through others."""
    held = {x.co_name: {*x.co_freevars} for x in siblings}
    found, rest = set(), [*code.co_freevars]
    while rest:
        name = rest.pop()
        if name in held and name not in found:
            found.add(name)
            rest += held[name]
    return found


def test_a_plan_of_a_long_loop_stays_small():
    def body(x, o):
        @plgpu.loop(0, 500)
        def _(i):
            o[i] = x[i]

    out = jax.ShapeDtypeStruct((500,), jnp.float32)
    kernel, x = plgpu.kernel(body, out_type=out), jnp.zeros(500)
    kernel(x)
    plan._PLANS.clear()
    tracemalloc.start()
    try:
        kernel(x)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        plan._PLANS.clear()
        gc.collect()
        held = before - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0 < held < 150_000


def test_threads_may_ask_for_plans_at_once():
    jaxprs = [jax.make_jaxpr(lambda x, i=i: x + i)(1.0) for i in range(6)]
    failures = []

    def ask(first):
        try:
            for i in itertools.islice(itertools.count(first, 5), 1500):
                jaxpr = jaxprs[i * i % 6]
                assert plan.plan_of(jaxpr).steps
                if i % 3:
                    plan._PLANS.pop(jaxpr, None)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
