# SPDX-License-Identifier: Apache-2.0
"""Functions of tensors under torch's autograd and `torch.compile`."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support.torch_calls import (
    N,
    add,
    double,
    equal,
    increment,
    on_each_device,
    torch,
    vector,
    weighted,
)

XS = np.arange(N, dtype=np.float32)
_NUMBERS = itertools.count()


def _name() -> str:
    """A name that no operation of this process has."""
    return f"pallas_gpu_tests::op{next(_NUMBERS)}"


def leaf(device, start=0):
    return vector(device, start).requires_grad_()


@on_each_device
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)])
def test_the_derivative_is_that_of_custom_vjp(device, wanted):
    xs = [leaf(device, i) if i in wanted else vector(device, i) for i in (0, 1)]
    result = plgpu.as_torch_kernel(weighted)(*xs)
    (result * vector(device)).sum().backward()
    for i, factor in ((0, 2), (1, 1)):
        if i in wanted:
            equal(xs[i].grad, factor * XS)


@on_each_device
def test_a_gradient_that_is_not_contiguous_is_copied(device):
    x, y = leaf(device), vector(device)
    plgpu.as_torch_kernel(weighted)(x, y).sum().backward()  # of stride 0
    equal(x.grad, np.full(N, 2))


@on_each_device
def test_a_backward_pass_does_not_update_what_it_gets(device):
    @jax.custom_vjp
    def f(x):
        return double(x)

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (add(increment(x), increment(ct)),))
    x, weights = leaf(device), vector(device)
    (gradient,) = torch.autograd.grad(plgpu.as_torch_kernel(f)(x), x, weights)
    equal(gradient, 2 * XS + 2)
    equal(x, XS)
    equal(weights, XS)


@on_each_device
def test_residuals_and_exact_results(device):
    @jax.custom_vjp
    def square(x):
        return x * x, jnp.arange(3), double(x)

    def pull(saved, cotangents):
        return (add(saved * 2 * cotangents[0], 2 * cotangents[2]),)

    square.defvjp(lambda x: (square(x), double(x) / 2), pull)
    x = leaf(device)
    result, exact, _ = plgpu.as_torch_kernel(square)(x)
    assert not exact.requires_grad
    assert exact.tolist() == [0, 1, 2]
    (gradient,) = torch.autograd.grad(result.sum(), x)
    equal(gradient, 2 * XS)


@on_each_device
def test_without_gradients_nothing_is_kept(device):
    kernel = plgpu.as_torch_kernel(weighted)
    x, y = leaf(device), leaf(device)
    with torch.no_grad():
        assert not kernel(x, y).requires_grad
    with torch.inference_mode():
        kernel(x, y)
    assert len(kernel._traces._traces) == 1


def test_a_kernel_without_a_derivative_has_none_in_torch():
    with pytest.raises(plgpu.errors.DifferentiationError, match="custom_vjp"):
        plgpu.as_torch_kernel(double)(leaf("cpu"))


OPS = {
    "matmul": (plgpu.ops.matmul, torch.matmul, [(128, 64), (64, 128)]),
    "rms_norm": (
        plgpu.ops.rms_norm,
        lambda x, w: torch.nn.functional.rms_norm(x, w.shape, w, 1e-6),
        [(64, 256), (256,)],
    ),
    "softmax": (plgpu.ops.softmax, lambda x: torch.softmax(x, -1), [(64, 256)]),
    "attention": (
        plgpu.ops.attention,
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v))
        ).transpose(1, 2),
        [(1, 128, 2, 64)] * 3,
    ),
}


@pytest.mark.parametrize("name", OPS)
@on_each_device
def test_ready_kernels_have_the_derivatives_of_torch(device, name):
    ours, reference, shapes = OPS[name]
    torch.manual_seed(0)
    xs = [torch.randn(s, device=device).bfloat16().requires_grad_() for s in shapes]
    wide = [x.detach().float().requires_grad_() for x in xs]
    result, expected = plgpu.as_torch_kernel(ours)(*xs), reference(*wide)
    weights = torch.randn(expected.shape, device=device)
    got = torch.autograd.grad((result.float() * weights).sum(), xs)
    wanted = torch.autograd.grad((expected * weights).sum(), wide)
    for a, b in zip((result, *got), (expected, *wanted), strict=True):
        scale = b.abs().max()
        assert (a.float() - b).abs().max() < 0.02 * scale


# --- torch.library --------------------------------------------------------------------


@on_each_device
def test_an_operation_passes_the_checks_of_torch(device):
    name = _name()
    plgpu.as_torch_kernel(weighted).custom_op(name, vector("cpu"), vector("cpu"))
    space, _, op = name.partition("::")
    registered = getattr(getattr(torch.ops, space), op)
    for wanted in ([False, False], [True, False]):
        xs = [vector(device, i).requires_grad_(x) for i, x in enumerate(wanted)]
        torch.library.opcheck(registered, (xs, wanted))


@on_each_device
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]
)
def test_compiled_programs_keep_the_operation_and_its_derivative(device, backend):
    op = plgpu.as_torch_kernel(weighted).custom_op(
        _name(), vector("cpu"), vector("cpu")
    )

    def model(x, y):
        return (op(x.sin(), y) * 3).cos().sum()

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    got, expected = ([leaf(device), leaf(device, 1)] for _ in range(2))
    value = compiled(*got)
    value.backward()

    def plain(x, y):
        return ((x.sin() * 2 + y) * 3).cos().sum()

    reference = plain(*expected)
    reference.backward()
    torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-3)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_graphs_of_compiled_programs_capture_the_operation():
    op = plgpu.as_torch_kernel(weighted).custom_op(
        _name(), vector("cpu"), vector("cpu")
    )
    compiled = torch.compile(
        lambda x, y: op(op(x, y) + 1, y), mode="reduce-overhead", fullgraph=True
    )
    for k in range(4):
        x, y = vector("cuda", k), vector("cuda")
        with torch.no_grad():
            equal(compiled(x, y), 7 * XS + 4 * k + 2)


@on_each_device
def test_a_compiled_program_knows_which_arguments_an_operation_updates(device):
    x = vector(device)
    updating = plgpu.as_torch_kernel(increment).custom_op(_name(), x)

    def f(ref, x):
        old = ref[...]
        ref[...] = double(x)
        return [old, x]

    storing = plgpu.as_torch_kernel(f, inout_argnums=[0]).custom_op(_name(), x, x)

    def model(x):
        y = x * 2
        updating(y)
        z = y.clone()
        old, same = storing(z, x)
        return y + 1, z, old, same + 1

    found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    for got, expected in zip(
        found, (2 * XS + 2, 2 * XS, 2 * XS + 1, XS + 1), strict=True
    ):
        equal(got, expected)
    registered = getattr(torch.ops.pallas_gpu_tests, f"op{next(_NUMBERS) - 1}")
    equal(registered(x, vector(device, 1)), XS)
    equal(x, 2 * XS + 2)
    assert updating(x) is x
    equal(x, 2 * XS + 3)


@on_each_device
def test_an_operation_takes_other_shapes_than_its_example(device):
    op = plgpu.as_torch_kernel(plgpu.ops.softmax).custom_op(
        _name(), torch.zeros(64, 256)
    )
    compiled = torch.compile(lambda x: op(x) + 1, backend="aot_eager", fullgraph=True)
    for rows in (64, 128):
        x = torch.randn(rows, 256, device=device)
        torch.testing.assert_close(compiled(x), x.softmax(-1) + 1, rtol=1e-4, atol=1e-5)


@on_each_device
def test_an_operation_is_differentiated_by_its_formula(device):
    name = _name()
    plgpu.as_torch_kernel(weighted).custom_op(name, vector("cpu"), vector("cpu"))
    registered = getattr(torch.ops.pallas_gpu_tests, name.rpartition(":")[2])
    x, y = leaf(device), leaf(device, 1)
    (result,) = registered([x, y], [True, True])
    (result * vector(device)).sum().backward()
    equal(result, 3 * XS + 1)
    equal(x.grad, 2 * XS)
    equal(y.grad, XS)


def test_without_an_operation_a_compiled_program_calls_the_function():
    f = plgpu.as_torch_kernel(double)
    compiled = torch.compile(lambda x: f(x + 1) * 3, backend="eager")
    equal(compiled(vector("cpu")), 6 * XS + 6)
