# SPDX-License-Identifier: Apache-2.0
"""A transformer of ready kernels alone, trained by plain gradient steps.

python -m examples.transformer trains a larger one for ten steps on a GPU, beside the
same model in plain JAX.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import Case, integers
from pallas_gpu import ops

type Parameters = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a decoder: pre-norm, rotary positions, grouped heads, SwiGLU."""

    vocabulary: int = 60
    width: int = 32
    layers: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    hidden: int = 40
    dtype: Any = jnp.bfloat16

    def initial(self, seed: int) -> Parameters:
        """Returns random weights."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = {
            "qkv": (self.width, q + 2 * kv),
            "out": (q, self.width),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }

        rng = np.random.default_rng(seed)

        def normal(*shape):
            return rng.standard_normal(shape, np.float32)

        def matrix(*shape):
            return (normal(*shape) / shape[0] ** 0.5).astype(self.dtype)

        def layer():
            weights = {name: matrix(*shape) for name, shape in sizes.items()}
            ones = np.ones(self.width, np.float32)
            return weights | {"attention_norm": ones, "mlp_norm": ones}

        return {
            "embedding": normal(self.vocabulary, self.width).astype(self.dtype),
            "layers": [layer() for _ in range(self.layers)],
            "norm": np.ones(self.width, np.float32),
            "head": matrix(self.width, self.vocabulary),
        }


class Ready:
    """The operations, by the kernels of `pallas_gpu.ops`."""

    norm = staticmethod(ops.rms_norm)
    rotary = staticmethod(ops.rotary_embedding)
    matmul = staticmethod(ops.matmul)
    attention = staticmethod(functools.partial(ops.attention, causal=True))
    losses = staticmethod(ops.linear_cross_entropy)


class Plain:
    """The same in plain JAX."""

    @staticmethod
    def norm(x, scale):
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
        return (y * scale).astype(x.dtype)

    @staticmethod
    def rotary(x):
        pairs = x.shape[3] // 2
        frequency = 10000.0 ** (-jnp.arange(pairs) / pairs)
        angle = jnp.arange(x.shape[1])[:, None, None] * frequency
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(
            x.dtype
        )

    @staticmethod
    def matmul(a, b, residual=0, gate=None):
        y = jnp.matmul(a, b, preferred_element_type=jnp.float32)
        if gate is not None:
            z = jnp.matmul(a, gate, preferred_element_type=jnp.float32)
            y = jax.nn.silu(z) * y
        return (y + residual).astype(a.dtype)

    @staticmethod
    def attention(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    @staticmethod
    def losses(x, w, labels):
        logits = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jax.nn.logsumexp(logits, -1) - picked


def loss(model: Model, by: Any, parameters: Parameters, tokens: jax.Array) -> jax.Array:
    """Returns the mean loss of predicting each token from those before it.

    Args:
      model: sizes.
      by: `Ready` or `Plain`.
      parameters: see `Model.initial`.
      tokens: (batch, length + 1), int32.
    """
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    x = parameters["embedding"][inputs]
    for weights in parameters["layers"]:
        x = _attention(model, by, weights, x)
        y = by.norm(x, weights["mlp_norm"])
        y = by.matmul(y, weights["up"], gate=weights["gate"])
        x = by.matmul(y, weights["down"], residual=x)
    x = by.norm(x, parameters["norm"])
    return by.losses(x, parameters["head"], labels).mean()


def _attention(model: Model, by: Any, weights: Any, x: jax.Array) -> jax.Array:
    batch, length, _ = x.shape
    qkv = by.matmul(by.norm(x, weights["attention_norm"]), weights["qkv"])
    heads = qkv.reshape(batch, length, -1, model.head_dim)
    q, k, v = jnp.split(heads, [model.heads, model.heads + model.kv_heads], axis=2)
    y = by.attention(by.rotary(q), by.rotary(k), v)
    return by.matmul(y.reshape(batch, length, -1), weights["out"], residual=x)


def train(
    model: Model, by: Any, parameters: Parameters, tokens: jax.Array, steps: int
) -> jax.Array:
    """Returns the losses of gradient steps on the same tokens."""

    @jax.jit
    def step(parameters: Parameters) -> tuple[jax.Array, Parameters]:
        value, gradients = jax.value_and_grad(functools.partial(loss, model, by))(
            parameters, tokens
        )
        changed = jax.tree.map(
            lambda p, g: (p - 0.2 * g.astype(jnp.float32)).astype(p.dtype),
            parameters,
            gradients,
        )
        return value, changed

    losses = []
    for _ in range(steps):
        value, parameters = step(parameters)
        losses.append(value)
    return jnp.stack(losses)


def main() -> None:
    """Prints the losses of both models."""
    model = Model(
        vocabulary=32000, width=1024, layers=4, heads=16, kv_heads=4, head_dim=64,
        hidden=2816,
    )  # fmt: skip
    parameters = model.initial(0)
    tokens = integers(1, 0, model.vocabulary, 4, 1001)
    ready, plain = (train(model, by, parameters, tokens, 10) for by in (Ready, Plain))
    print("step  pallas_gpu.ops  plain JAX  difference")
    for i, (a, b) in enumerate(zip(ready, plain, strict=True)):
        print(f"{i:4}  {a:14.5f}  {b:9.5f}  {abs(a - b):10.1e}")


_MODEL = Model()
_PARAMETERS = _MODEL.initial(0)
_TOKENS = integers(1, 0, _MODEL.vocabulary, 1, 25)
CASES = [
    Case(
        functools.partial(train, _MODEL, Ready, steps=2),
        functools.partial(train, _MODEL, Plain, steps=2),
        (_PARAMETERS, _TOKENS),
        2e-2,
    )
]

if __name__ == "__main__":
    main()
