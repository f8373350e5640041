# SPDX-License-Identifier: Apache-2.0
"""Functions of tensors: what they compute, where it is stored, when it is compiled."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pallas_gpu as plgpu
from tests.support.grid_barrier import GridBarrier
from tests.support.torch_calls import (
    VECTOR,
    N,
    accumulate,
    add,
    double,
    equal,
    increment,
    increment_ref,
    on_each_device,
    torch,
    vector,
)

XS = np.arange(N, dtype=np.float32)


@on_each_device
def test_a_kernel_takes_and_returns_tensors(device):
    x = vector(device)
    result = plgpu.as_torch_kernel(double)(x)
    assert result.device == x.device
    equal(result, 2 * XS)
    equal(x, XS)


@on_each_device
def test_a_kernel_for_the_emulator_takes_tensors_of_any_device(device):
    f = plgpu.pallas_call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] + 1),
        VECTOR,
        input_output_aliases={0: 0},
        interpret=True,
    )
    x = vector(device)
    assert plgpu.as_torch_kernel(f)(x) is x
    equal(x, XS + 1)


@on_each_device
def test_several_kernels_are_one_function(device):
    @jax.jit
    def f(x, y):
        return add(double(x), jax.jit(double)(y))

    equal(plgpu.as_torch_kernel(f)(vector(device), vector(device, 5)), 4 * XS + 10)


@on_each_device
def test_kernels_of_jax_with_our_parameters(device):
    f = pl.pallas_call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] * 3),
        out_shape=VECTOR,
        compiler_params=plgpu.CompilerParams(),
    )
    equal(plgpu.as_torch_kernel(f)(vector(device)), 3 * XS)


@on_each_device
def test_arguments_and_results_are_pytrees(device):
    def f(tensors, more):
        return {"sum": add(tensors["a"], tensors["b"]), "all": (double(more[0]), ())}

    x = vector(device)
    found = plgpu.as_torch_kernel(f)({"b": x, "a": x}, [x])
    assert found.keys() == {"sum", "all"}
    equal(found["sum"], 2 * XS)
    equal(found["all"][0], 2 * XS)
    assert found["all"][1] == ()


@on_each_device
def test_an_empty_result_is_an_empty_tensor(device):
    empty = jax.ShapeDtypeStruct((0, 3), jnp.bfloat16)

    @plgpu.kernel(out_type=(empty, VECTOR))
    def f(x_ref, _, o_ref):
        o_ref[...] = x_ref[...]

    nothing, x = plgpu.as_torch_kernel(f)(vector(device))
    assert (nothing.shape, nothing.dtype) == ((0, 3), torch.bfloat16)
    equal(x, XS)


DTYPES = ["bfloat16", "float16", "float32", "int8", "int32", "uint8", "uint32", "bool"]


@on_each_device
@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e4m3fn", "float8_e5m2"])
def test_elements_keep_their_bits(device, dtype):
    bits = torch.randint(0, 2, (64, 64), dtype=torch.uint8, device=device)
    x = bits.to(getattr(torch, dtype))

    @plgpu.kernel(out_type=jax.ShapeDtypeStruct(x.shape, dtype))
    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    copied = plgpu.as_torch_kernel(copy)(x)
    assert copied.dtype == x.dtype
    assert torch.equal(copied.view(torch.uint8), x.view(torch.uint8))


# --- between kernels ------------------------------------------------------------------

HALF = np.float32(0.5)
BETWEEN = {
    "constants": lambda x: x + jnp.arange(N) * HALF + jnp.ones((1, N))[0],
    "broadcasts": lambda x: x + jnp.broadcast_to(x[0], (N,)),
    "a column": lambda x: (x[:, None] + jnp.zeros((N, 2), jnp.float32))[:, 1],
    "shapes": lambda x: x.reshape(4, 64).T.reshape(N),
    "axes of size 1": lambda x: x.reshape(1, 4, 64).transpose(1, 0, 2)[:, 0].reshape(N),
    "slices": lambda x: jnp.concatenate([x[1:], x[:1]]),
    "strided": lambda x: jnp.concatenate([x[::2], x[1::2]])[::-1],
    "padding": lambda x: lax.pad(x[:100], x[3], [(2, 55, 1)]),
    "converts": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "precision": lambda x: (
        1024 * lax.reduce_precision(x * 1021 + 3, 8, 10)
        + lax.reduce_precision(x * 1021 + 3, 8, 3)
    ),
    "reductions": lambda x: x - x.max() + x.reshape(2, -1).min(0).sum(),
    "elementwise": lambda x: jnp.tanh(x) + jnp.sqrt(x) * -jnp.exp(-x) / (x + 1) ** 3,
    "comparisons": lambda x: jnp.where((x > 3) & ~(x == 7), x, -x),
    "integers": lambda x: (x > 5).astype(jnp.int32).astype(jnp.float32) * x,
    "clamped": lambda x: (
        (lax.clamp(HALF, jnp.round(x / 4), x) * 1e9)
        .astype(jnp.int32)
        .astype(jnp.float32)
        + (jnp.sqrt(100 - x)).astype(jnp.uint8).astype(jnp.float32)
    ),
    "a custom derivative": lambda x: jax.nn.relu(x - 100),
    "a checkpoint": jax.checkpoint(lambda x: x * x),
}


@on_each_device
@pytest.mark.parametrize("name", BETWEEN)
def test_between_kernels_torch_does_what_xla_would(device, name):
    def f(x):
        return double(BETWEEN[name](double(x)))

    got = plgpu.as_torch_kernel(f)(vector(device))
    expected = np.asarray(2 * BETWEEN[name](jnp.asarray(2 * XS)))
    np.testing.assert_allclose(got.cpu().numpy(), expected, rtol=2e-6, atol=1e-6)


@on_each_device
def test_semaphores_start_at_zero_in_every_call(device):
    ctas = 4

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((ctas, 128), jnp.float32),
        grid=(ctas,),
        grid_names=("i",),
    )
    def rotate(x_ref, o_ref):
        i = lax.axis_index("i")
        barrier = GridBarrier.of(ctas)
        o_ref[i] = x_ref[i]
        barrier.meet(i)
        row = plgpu.load(o_ref.at[(i + 1) % ctas])
        barrier.meet(i)
        o_ref[i] = row

    f = plgpu.as_torch_kernel(rotate)
    x = torch.rand(ctas, 128, device=device)
    for _ in range(2):
        assert torch.equal(f(x), x.roll(-1, 0))


# --- in place -------------------------------------------------------------------------


@on_each_device
def test_an_aliased_argument_is_updated_and_returned(device):
    x = vector(device)
    version = x._version
    assert plgpu.as_torch_kernel(increment)(x) is x
    equal(x, XS + 1)
    assert x._version > version


@on_each_device
def test_a_view_of_an_argument_is_updated_as_well(device):
    x = vector(device).reshape(16, 16)
    result = plgpu.as_torch_kernel(lambda x: increment(x.reshape(N)))(x)
    equal(x.reshape(N), XS + 1)
    assert result.data_ptr() == x.data_ptr()


NOT_IN_PLACE = {
    "read by a kernel": lambda x: add(increment(x), x),
    "read by the kernel itself": lambda x: accumulate(x, x) + 1,
    "read by torch": lambda x: increment(x) + x.reshape(N),
    "returned": lambda x: add(increment(x), double(x[:])) + (0 * x),
}


@on_each_device
def test_an_argument_that_is_transposed_first_is_not_updated(device):
    x = vector(device).reshape(16, 16)
    new = plgpu.as_torch_kernel(lambda x: increment(x.T.reshape(N)))(x)
    equal(new, XS.reshape(16, 16).T.reshape(N) + 1)
    equal(x.reshape(N), XS)


@on_each_device
@pytest.mark.parametrize("name", NOT_IN_PLACE)
def test_what_is_read_afterwards_is_not_updated(device, name):
    x = vector(device)
    result = plgpu.as_torch_kernel(NOT_IN_PLACE[name])(x)
    equal(x, XS)
    equal(result, {"returned": 3 * XS + 1}.get(name, 2 * XS + 1))


@on_each_device
def test_old_and_new_contents_are_returned(device):
    x = vector(device)
    old, new = plgpu.as_torch_kernel(lambda x: (x, increment(x)))(x)
    assert old is x
    equal(old, XS)
    equal(new, XS + 1)


@on_each_device
def test_a_constant_is_not_updated(device):
    f = plgpu.as_torch_kernel(
        lambda x: (increment(jnp.zeros(N)), jnp.ones(3), double(x))
    )
    for _ in range(2):
        new, ones, _ = f(vector(device))
        equal(new, np.ones(N))
        equal(ones, np.ones(3))
        ones += 1


@on_each_device
def test_what_a_kernel_made_is_updated_again_and_again(device):
    f = plgpu.as_torch_kernel(lambda x: increment(increment(double(x))))
    equal(f(vector(device)), 2 * XS + 2)


@on_each_device
def test_a_view_of_what_is_returned_is_not_updated(device):
    def f(x):
        first = increment(double(x))
        return first, increment(first.reshape(16, 16).reshape(N))

    first, second = plgpu.as_torch_kernel(f)(vector(device))
    equal(first, 2 * XS + 1)
    equal(second, 2 * XS + 2)


@on_each_device
def test_a_function_updates_references(device):
    def f(state, x):
        increment_ref(state["a"])
        state["b"][...] = double(state["a"][...])
        return double(x)

    a, b, x = (vector(device) for _ in range(3))
    result = plgpu.as_torch_kernel(f, inout_argnums=[0])({"a": a, "b": b}, x)
    equal(a, XS + 1)
    equal(b, 2 * XS + 2)
    equal(x, XS)
    equal(result, 2 * XS)


@on_each_device
def test_references_swap_their_contents(device):
    def f(a, b):
        old = a[...]
        a[...] = b[...]
        b[...] = old
        return old, double(old)

    a, b = vector(device), vector(device, 10)
    old, _ = plgpu.as_torch_kernel(f, inout_argnums=(0, 1))(a, b)
    equal(a, XS + 10)
    equal(b, XS)
    equal(old, XS)


@on_each_device
def test_nothing_is_computed_that_nobody_reads(device):
    launched = []

    def f(x):
        launched.append(double(x))
        return add(x, x)

    kernel = plgpu.as_torch_kernel(f)
    equal(kernel(vector(device)), 2 * XS)
    (traced,) = kernel._traces._traces.values()
    assert len(launched) == len(traced.forward.steps) == 1


# --- compiled once --------------------------------------------------------------------


@on_each_device
def test_a_function_is_traced_once_for_each_combination_of_types(device):
    traces = []

    def f(x):
        traces.append(x.shape)
        return x * 2

    kernel = plgpu.as_torch_kernel(f)
    for n in (4, 8, 4, 8):
        x = torch.ones(n, device=device)
        assert torch.equal(kernel(x), x * 2)
    assert traces == [(4,), (8,)]
    kernel.unload()
    kernel(torch.ones(4, device=device))
    assert len(traces) == 3


def test_a_function_is_made_without_the_compiler_of_torch():
    # Its import takes seconds.
    text = """if True:
        import sys, torch, pallas_gpu as plgpu
        f = plgpu.as_torch_kernel(lambda x: x + 1)
        assert f(torch.zeros(3)).tolist() == [1, 1, 1]
        assert "torch._dynamo" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", text], check=True)


def test_code_is_unloaded_with_the_function(monkeypatch):
    code = pytest.importorskip("pallas_gpu.bridge.torch.code")
    unloaded, pointers = [], (code.ctypes.c_void_p * 2)(1, 2)
    fake = code.Library(lambda *_: pointers, unloaded.append)
    monkeypatch.setattr(code, "library", lambda: fake)
    for name in ("device", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, _Nothing)
    loaded = code.Code(code.SerializedModule(b"abc", b"hash"), "kernel", 0)
    assert not unloaded
    del loaded
    gc.collect()
    assert unloaded == [pointers]


class _Nothing:
    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    synchronize = __enter__


# --- on a GPU -------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_launch_is_ordered_by_the_current_stream():
    f = plgpu.as_torch_kernel(double)
    x = vector("cuda")
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    # What a first use allocates or loads waits for the device.
    with torch.cuda.stream(side):
        torch.cuda._sleep(1)
        f(x + 1)
        x += 0
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        x += 1
        result = f(x)
        event.record()
        # On any other stream the launch would have read x before.
        assert not event.query()
    side.synchronize()
    equal(result, 2 * XS + 2)


@pytest.mark.gpu
def test_a_graph_replays_launches_with_new_contents():
    f = plgpu.as_torch_kernel(lambda x, y: increment(add(double(x), y + 1)))
    x, y = vector("cuda"), vector("cuda")
    f(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = f(x, y)
    del f
    gc.collect()  # what the graph launches stays
    for k in range(3):
        x.fill_(k)
        graph.replay()
        equal(result, 2.0 * k + XS + 2)


@pytest.mark.gpu
def test_a_graph_does_not_capture_the_first_call():
    f = plgpu.as_torch_kernel(double)
    x = vector("cuda")
    with (
        pytest.raises(plgpu.errors.UnsupportedError, match="before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        f(x)
    equal(f(x), 2 * XS)


@pytest.mark.gpu
def test_a_new_thread_launches():
    f, results = plgpu.as_torch_kernel(double), []
    x = vector("cuda")
    f(x)
    threads = [threading.Thread(target=lambda: results.append(f(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 4
    for result in results:
        equal(result, 2 * XS)


@pytest.mark.gpu
def test_the_plugin_unloads_code_that_nobody_has(monkeypatch):
    from pallas_gpu.bridge.torch import code

    functions, unloaded = code.library(), []

    def unload(compiled):
        unloaded.append(functions.unload(compiled))

    watched = code.Library(functions.compile, unload)
    monkeypatch.setattr(code, "library", lambda: watched)

    @plgpu.kernel(out_type=VECTOR)
    def own(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 17

    f = plgpu.as_torch_kernel(own)
    other = plgpu.as_torch_kernel(lambda x: own(own(x)))
    equal(f(vector("cuda")), 17 * XS)
    equal(other(vector("cuda")), 289 * XS)
    f.unload()
    gc.collect()
    assert not unloaded  # kernels of equal bytes share their code
    del other
    gc.collect()
    assert len(unloaded) == 1
    equal(f(vector("cuda")), 17 * XS)
