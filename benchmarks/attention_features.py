# SPDX-License-Identifier: Apache-2.0
"""Attention's options on a GPU: bias, packed sequences, segments, lengths, float8.

python -m benchmarks.attention_features [--json] [--case NAME ...] [--rounds N]

Beside cuDNN where it computes the same, and beside the same products in bfloat16.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from pallas_gpu import ops

INPUTS = 2
BF16, F8 = jnp.bfloat16, jnp.float8_e4m3fn
# Relative errors against float32 of operands of 8 bits, and of float8's 4.
LARGEST_ERRORS = 1.5e-2, 5e-2
# Products of the backward pass are 2.5 times those of the forward pass.
PASSES = 3.5
# Tokens of sequences of very different lengths: 16384.
LENGTHS = 4096, 2048, 3000, 1000, 1500, 2740, 1000, 1000
STARTS = np.cumsum((0, *LENGTHS))
Function = Callable[..., Any]
cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem, forward or with derivatives.

    Attributes:
      shape: (batch, length, heads, head_dim) of q, k and v; packed ones are without
        batch.
      bias: its shape, or None. Its type is float32 for a single row, else bfloat16.
      lengths: of the sequences, packed one after another or in rows of a batch.
      scaled: operands are numbers of float8, in bfloat16 and in float8.
      candidates: functions of q, k, v and of the bias, if there is one.
    """

    shape: tuple[int, ...]
    candidates: dict[str, Function]
    causal: bool = False
    bias: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    scaled: bool = False
    backward: bool = False

    @property
    def sequences(self) -> list[tuple[Any, ...]]:
        """Indices of the tokens of each sequence."""
        if self.lengths is None:
            return [(i,) for i in range(self.shape[0])]
        if len(self.shape) == 3:
            return [(slice(*x),) for x in itertools.pairwise(STARTS)]
        return [(i, slice(n)) for i, n in enumerate(self.lengths)]

    @property
    def flops(self) -> float:
        """Operations of the products of what is visible."""
        lengths = self.lengths or (self.shape[1],) * self.shape[0]
        scores = sum(n * n for n in lengths) / (2 if self.causal else 1)
        passes = PASSES if self.backward else 1
        return 4 * passes * self.shape[-2] * self.shape[-1] * scores

    def inputs(self, seed: int) -> list[Any]:
        """Returns q, k, v, the bias, and with derivatives dO."""
        keys = jax.random.split(jax.random.key(seed), 5)
        arrays = [jax.random.normal(k, self.shape, BF16) for k in keys[:3]]
        if self.scaled:
            narrow = [x.astype(F8) for x in arrays]
            return [*(x.astype(BF16) for x in narrow), *narrow]
        if self.bias is not None:
            dtype = jnp.float32 if self.bias[2] == 1 else BF16
            arrays.append(jax.random.normal(keys[3], self.bias, dtype))
        if self.backward:
            arrays.append(jax.random.normal(keys[4], self.shape, BF16))
        return arrays

    def wrapped(self, f: Function) -> Function:
        """Returns a candidate with its derivatives, if they are measured."""
        if not self.backward:
            return lambda *operands: (f(*operands),)

        def both(*operands: Any) -> Any:
            out, vjp = jax.vjp(f, *operands[:-1])
            return out, *vjp(operands[-1])

        return both

    def expected(self, operands: Sequence[Any]) -> Any:
        """Returns what a candidate's last heads are to be, from float32."""
        if self.scaled:
            operands = operands[:3]
        heads = [x[..., -1, :].astype(jnp.float32) for x in operands]
        if self.bias is not None:
            heads[3] = operands[3].astype(jnp.float32)[:, -1]
        return self.wrapped(self._reference)(*heads)

    def _reference(self, q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        """Returns the result of one head, from whole scores."""
        precise = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        out = jnp.zeros_like(v)
        for i, at in enumerate(self.sequences):
            scores = precise(q[at], k[at].T) * self.shape[-1] ** -0.5
            if bias is not None:
                scores += bias[i if len(bias) > 1 else 0]
            if self.causal:
                scores = jnp.where(jnp.tri(len(scores), dtype=bool), scores, -jnp.inf)
            out = out.at[at].set(precise(jax.nn.softmax(scores, axis=1), v[at]))
        return out

    def errors(self, results: Sequence[Any], wanted: Sequence[Any]) -> list[float]:
        """Returns the relative errors of the last head."""
        found = [x[..., -1, :] for x in results]
        if self.backward and self.bias is not None:
            found[4] = results[4][:, -1]
        used = [self._used(x) for x in found[:4]] + list(found[4:])
        of_used = [self._used(x) for x in wanted[:4]] + list(wanted[4:])
        return [
            float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
            for a, b in zip(used, of_used, strict=True)
        ]

    def _used(self, x: Any) -> Any:
        """Returns rows that exist."""
        if self.lengths is None or len(self.shape) == 3:
            return x
        return jnp.concatenate([x[at] for at in self.sequences])


def _with_bias(f: Function) -> Function:
    return lambda q, k, v, bias: f(q, k, v, bias=bias)


def _of_lengths() -> dict[str, Any]:
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    return {"q_lengths": lengths, "kv_lengths": lengths}


def _packed(q: Any, k: Any, v: Any, **options: Any) -> Any:
    starts = jnp.asarray(STARTS, jnp.int32)
    given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, **options}
    return ops.attention(q, k, v, causal=True, **given)


def _segments(q: Any, k: Any, v: Any, **options: Any) -> Any:
    ids = jnp.asarray(np.repeat(np.arange(len(LENGTHS)), LENGTHS)[None], jnp.int32)
    given = {"q_segment_ids": ids, "kv_segment_ids": ids, **options}
    out = ops.attention(*(x[None] for x in (q, k, v)), causal=True, **given)
    return out[0]


def _padded_rival(q: Any, k: Any, v: Any) -> Any:
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    given = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    return cudnn(q, k, v, is_causal=True, **given)


def _padded(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return ops.attention(q, k, v, causal=True, **_of_lengths(), **options)


def _scaled(causal: bool) -> dict[str, Function]:
    """Returns candidates that take the operands in bfloat16 and in float8."""
    return {
        "cuDNN, bfloat16": lambda *x: cudnn(*x[:3], is_causal=causal),
        "pallas_gpu, bfloat16": lambda *x: ops.attention(*x[:3], causal=causal),
        # With the transposition of V by XLA.
        "pallas_gpu": lambda *x: ops.attention(
            *x[3:], causal=causal, q_scale=1.0, k_scale=1.0, v_scale=1.0
        ),
    }


_DENSE, _TOKENS = (4, 2048, 16, 128), (sum(LENGTHS), 16, 128)
_BATCH = len(LENGTHS), max(LENGTHS), 16, 128
_BIASED = {"cuDNN": _with_bias(cudnn), "pallas_gpu": _with_bias(ops.attention)}
_PACKED: dict[str, Function] = {
    "pallas_gpu, packed": _packed,
    "pallas_gpu, segments": _segments,
}
_PADDED: dict[str, Function] = {"cuDNN": _padded_rival, "pallas_gpu": _padded}
CASES: dict[str, Case] = {}
for _label, _backward in (("", False), (", derivatives", True)):
    _options: dict[str, Any] = {"backward": _backward}
    CASES |= {
        f"bias of heads{_label}": Case(
            _DENSE, _BIASED, bias=(1, 16, 2048, 2048), **_options
        ),
        f"bias of columns{_label}": Case(
            _DENSE, _BIASED, bias=(4, 16, 1, 2048), **_options
        ),
        f"sequences{_label}": Case(
            _TOKENS, _PACKED, causal=True, lengths=LENGTHS, **_options
        ),
        f"padded sequences{_label}": Case(
            _BATCH, _PADDED, causal=True, lengths=LENGTHS, **_options
        ),
    }
CASES |= {
    f"float8 {shape}{', causal' if causal else ''}": Case(
        shape, _scaled(causal), causal=causal, scaled=True
    )
    for shape in ((4, 4096, 16, 128), (1, 16384, 16, 128), (4, 4096, 16, 64))
    for causal in (False, True)
}


def compiled(labels: Sequence[str]) -> dict[tuple[str, str], Any]:
    """Returns the candidates of the cases, compiled at the same time, or errors."""

    def one(case: Case, f: Function) -> Any:
        like = jax.eval_shape(functools.partial(case.inputs, 0))
        try:
            return jax.jit(case.wrapped(f)).lower(*like).compile()
        except Exception as e:
            return e

    with ThreadPoolExecutor() as pool:
        jobs = {
            (label, name): pool.submit(one, CASES[label], f)
            for label in labels
            for name, f in CASES[label].candidates.items()
        }
        return {key: job.result() for key, job in jobs.items()}


def measure(
    label: str, functions: dict[tuple[str, str], Any], rounds: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Times the candidates of one case; checks them against float32."""
    case = CASES[label]
    inputs = [case.inputs(seed) for seed in range(INPUTS)]
    wanted = jax.jit(case.expected)(inputs[0])
    working, failures = {}, []
    for name in case.candidates:
        f = functions[label, name]
        try:
            if isinstance(f, Exception):
                raise f
            errors = case.errors(f(*inputs[0]), wanted)
        except Exception as e:
            text = " ".join(f"{type(e).__name__}: {e}".split())
            failures.append(f"{label}, {name}: {text[:300]}")
            continue
        if max(errors) < LARGEST_ERRORS[case.scaled]:
            working[name] = f, max(errors)
        else:
            failures.append(f"{label}, {name}: relative errors {errors}")
    chosen = {name: f for name, (f, _) in working.items()}
    times = timing.on_device(chosen, inputs, rounds=rounds)
    rival = next((t for name, t in times.items() if name.startswith("cuDNN")), None)
    rows = [
        {
            "case": label,
            "kernels": name,
            "µs": times[name] * 1e6,
            "TFLOP/s": case.flops / times[name] / 1e12,
            "largest rel. error": error,
            "of cuDNN": "" if rival is None else rival / times[name],
        }
        for name, (_, error) in working.items()
    ]
    return rows, failures


def main() -> None:
    """Measures the cases and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    labels = options.case or list(CASES)
    functions = compiled(labels)
    found = [measure(label, functions, options.rounds) for label in labels]
    rows = [row for of_case, _ in found for row in of_case]
    failures = [text for _, of_case in found for text in of_case]
    report(rows, failures, options.rounds, options.json)


def report(
    rows: list[dict[str, Any]], failures: list[str], rounds: int, as_json: bool
) -> None:
    """Prints the table, followed by the failures."""
    notes = (
        f"Random normal; bias: {_DENSE}; sequences: causal, of {LENGTHS} tokens, 16 "
        "heads of 128, packed or in a batch as long as the longest; TFLOP/s of what is "
        f"visible, with derivatives {PASSES} times those of the forward pass; float8: "
        "with the transposition of V, rivals in bfloat16; device times, medians of "
        f"{rounds} rounds of one call of each in a shuffled order; errors of "
        "one head against float32."
    )
    if rows:
        timing.report("Attention with options", rows, notes, as_json)
    if failures and not as_json:
        print("\nFailed:\n\n" + "\n".join(f"- {text}" for text in failures))


if __name__ == "__main__":
    main()
