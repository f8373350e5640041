# SPDX-License-Identifier: Apache-2.0
"""Loops whose loads from GMEM are copies to SMEM, issued iterations before.

`plgpu.loop(..., num_stages=n)` is traced as one operation, and becomes a loop with a
ring of buffers in SMEM for each load: n - 1 iterations are copied before the loop; an
iteration waits for its own copies, starts those of the iteration n - 1 after it, and
reads its buffers where the body loads. Copies by TMA complete on a barrier of their
slot. Those by cp.async are groups: an iteration has the same number of them always, of
which those behind the end of the loop are empty.

Indices that are loaded themselves travel in registers: an iteration loads those of the
iteration n after it, so that nothing waits for them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry import control, scope, scoped
from pallas_gpu.entry.plain import choice, sources, stages
from pallas_gpu.entry.plain.counted import Counted
from pallas_gpu.entry.plain.sources import Loaded
from pallas_gpu.entry.plain.stages import Load
from pallas_gpu.primitives import _engines, cp_async, mbarrier, registers, rows, tma
from pallas_gpu.primitives.indices import multiples
from pallas_gpu.program.build import CALLS
from pallas_gpu.program.rewrite import Retrace, values_of

_WHO = "loop"


@dataclasses.dataclass
class Kernel:
    """What a kernel asks of its loops.

    Attributes:
      num_stages: see `CompilerParams`.
      smem_bytes: what it declares.
      notes: lines of loads that stay in loops with stages or products, and why.
    """

    num_stages: int | None
    smem_bytes: int
    notes: dict[tuple[str, str], None] = dataclasses.field(default_factory=dict)


def results(
    trace: Retrace,
    eqn: _jax.JaxprEqn,
    operands: list[Any],
    written: Sequence[bool],
    kernel: Kernel,
) -> list[Any] | None:
    """Returns the results of a loop that copies ahead; None for one that does not.

    Args:
      trace: what traces the kernel again.
      eqn: the loop.
      operands: the values of its operands.
      written: for each operand whether the kernel writes to it.

    Raises:
      UnsupportedError: its own `num_stages` is above 1, and none of its loads can be a
        copy ahead.
    """
    found, asked = Counted.of(eqn, operands), eqn.params.get("num_stages")
    if found is None:
        kernel.notes.update(dict.fromkeys(choice.uncounted(eqn)))
    if found is None or (asked is None and scope.in_warp()):
        return None
    if asked == 1:
        step = functools.partial(found.step, trace, found.consts)
        iteration = lambda i, carry: step(carry, i)  # noqa: E731
        last = control.counted_loop(
            found.trips, iteration, list(found.carry), unroll=found.unroll
        )
        return found.results(last)
    mesh = scope.current_mesh(_WHO)
    if not isinstance(mesh, types.Mesh):
        raise errors.UnsupportedError(
            "loop: num_stages is for kernels of GPUs",
            expected="num_stages=1",
            got=asked,
            hint="leave it out",
        )
    consts = list(found.consts)
    flat, tree = jax.tree.flatten((consts, list(found.carry)))
    n_flat = len(jax.tree.leaves(consts))
    index = _jax.ShapedArray((), jnp.dtype(jnp.int32))

    def body(*leaves: Any) -> Any:
        known = [sources.computed(x) for x in flat[:n_flat]]
        given = [a if b is None else b for a, b in zip(leaves, known, strict=False)]
        consts, carry = jax.tree.unflatten(tree, [*given, *leaves[n_flat:-1]])
        return found.step(trace, consts, carry, leaves[-1])

    avals = [*map(jax.typeof, flat), index]
    closed, out_tree = _jax.trace(body, avals)
    closed, _ = _jax.trace(lambda *xs: _Inlined().run(closed, xs), avals)
    # Loops in it have buffers by now.
    inner = choice.smem_bytes(closed.jaxpr) - choice.smem_bytes(found.jaxpr)
    first = eqn.params.get("cond_nconsts", 0)
    changed = itertools.chain(written[first : first + found.given], itertools.repeat(0))
    is_written = [
        bool(w)
        for x, w in zip(consts, changed, strict=False)
        for _ in jax.tree.leaves(x)
    ]
    loop = _Loop(
        stages.LoopBody(closed, is_written, found.jaxpr),
        closed, flat[:n_flat], found.trips, asked, kernel, mesh,
        kernel.smem_bytes + inner,
    )  # fmt: skip
    if not loop.is_chosen(_jax.where(eqn)):
        return None
    last = loop.run(flat[n_flat:], found.unroll)
    return found.results(jax.tree.unflatten(out_tree, last))


class _Inlined(Retrace):
    """A body without calls."""

    def is_replaced(self, eqn: _jax.JaxprEqn) -> bool:
        return eqn.primitive.name in CALLS


class _Loop:
    """A loop with copies ahead.

    Attributes of one run:
      copies: what replaces loads.
      refs: for each of them the buffers.
      barrier: a barrier of each slot; None without copies by TMA.
    """

    def __init__(
        self,
        body: stages.LoopBody,
        closed: _jax.ClosedJaxpr,
        consts: Sequence[Any],
        trips: Any,
        asked: int | None,
        kernel: Kernel,
        mesh: types.Mesh,
        used_bytes: int,
    ):
        self._body, self._jaxpr, self._mesh = body, closed.jaxpr, mesh
        self._consts, self._own = list(consts), _jax.consts_of(closed)
        self._trips, self._asked, self._kernel = trips, asked, kernel
        self._used_bytes = used_bytes
        self._stages = 2
        self._refs: list[Any] = []
        self._barrier: Any = None

    def is_chosen(self, where: str | None) -> bool:
        """Chooses the copies and the stages; whether there are any.

        Raises:
          UnsupportedError: none, and the loop asks for them.
        """
        self._copies, body = self._chosen(), self._body
        most = self._asked or 2
        if self._asked is None:
            self._copies = [x for x in self._copies if choice.is_worth(x)]
            try:
                most = choice.num_stages(
                    body, self._copies, self._trips, self._mesh, self._used_bytes,
                    self._kernel.num_stages,
                )  # fmt: skip
            except stages.RefusedError as why:
                body.refuse_all(str(why))
                self._copies = []
        self._kernel.notes.update(dict.fromkeys(body.left()))
        if not self._copies:
            if self._asked is None:
                return False
            raise body.nothing(self._asked, where)
        # With more stages a loop of few iterations would wait for no copy.
        known = self._trips + 1 if isinstance(self._trips, int) else most
        self._stages = max(2, min(most, known))
        return True

    def run(self, carry: list[Any], unroll: Any) -> list[Any]:
        """Runs the loop; returns the last carry."""
        if isinstance(self._trips, int) and not self._trips:
            return carry
        sliced = self._body.slice_of(self._copies)
        self._indexing = [e for e in sliced if e.primitive in sources.LOADS]
        self._computing = [e for e in sliced if e.primitive not in sources.LOADS]
        self._sliced, self._rest = sliced, self._body.without(self._copies)
        declared: list[Any] = [_declaration(x, self._stages) for x in self._copies]
        n_tma = sum(copy.by_tma for copy in self._copies)
        if n_tma:
            declared.append(
                types.Barrier(num_arrivals=n_tma, num_barriers=self._stages)
            )

        def within(*refs: Any) -> list[Any]:
            self._refs = list(refs[: len(self._copies)])
            self._barrier = refs[-1] if n_tma else None
            return self._all(carry, unroll)

        if self._mesh.warpgroups > 1 and not scope.in_warp():
            return scoped.of_warpgroup(within, *declared)
        return scoped.scoped(within, declared)

    def _all(self, carry: list[Any], unroll: Any) -> list[Any]:
        ahead = self._fill()

        def iteration(i: Any, state: Any) -> Any:
            carry, ahead, slot = state
            slot, free, after = self._slots(i, slot)
            self._wait(slot)
            later = i + np.int32(self._stages - 1)
            self._start(later, free, ahead, later < self._trips)
            ahead = self._indices(later + np.int32(1))
            return self._step(i, slot, carry), ahead, after

        first: Any = [] if self._is_power else np.int32(0)
        with _jax.trace_without_ref_rules():
            last, *_ = control.counted_loop(
                self._trips, iteration, (carry, ahead, first), unroll=unroll
            )
        return last

    @property
    def _is_power(self) -> bool:
        """Whether a slot is the last bits of the index; else the loop carries it."""
        return self._stages & (self._stages - 1) == 0

    def _slots(self, i: Any, slot: Any) -> tuple[Any, Any, Any]:
        """Returns the slot of an iteration, the free one, and that of the next one."""
        n, one = np.int32(self._stages), np.int32(1)
        if self._is_power:
            return i & (n - one), (i - one) & (n - one), slot
        before = lax.select(slot == 0, n - one, slot - one)
        return slot, before, lax.select(slot == n - one, np.int32(0), slot + one)

    # --- copies -----------------------------------------------------------------------

    def _fill(self) -> list[Any]:
        """Starts the first copies; returns what the next ones are indexed with."""
        static = isinstance(self._trips, int)
        for i in range(self._stages - 1):
            # As many stages as there are iterations, if these are known.
            live = None if static else np.int32(i) < self._trips
            self._start(np.int32(i), i, self._first_indices(i), live)
        return self._first_indices(self._stages - 1)

    def _first_indices(self, i: int) -> list[Any]:
        if isinstance(self._trips, int) or not self._indexing:
            return self._indices(np.int32(i))
        avals = [v.aval for eqn in self._indexing for v in eqn.outvars]
        # A loop without iterations loads nothing.
        with _jax.trace_without_ref_rules():
            return lax.cond(
                self._trips > 0,
                lambda: self._indices(np.int32(i)),
                lambda: [jnp.zeros(a.shape, a.dtype) for a in avals],
            )

    def _indices(self, i: Any) -> list[Any]:
        """Loads what the copies of an iteration are indexed with."""
        if not self._indexing:
            return []
        known = self._known(self._clamped(i))
        Retrace().evaluate(self._sliced, known)
        return [known[v] for eqn in self._indexing for v in eqn.outvars]

    def _clamped(self, i: Any) -> Any:
        """Returns an iteration of the loop, the last one for those behind its end."""
        return lax.min(jnp.asarray(i), jnp.asarray(self._trips - 1, jnp.int32))

    def _start(self, i: Any, slot: Any, indices: Sequence[Any], live: Any) -> None:
        """Starts the copies of an iteration to a slot, if it is one."""
        known = self._known(self._clamped(i) if live is not None else i)
        made = [v for eqn in self._indexing for v in eqn.outvars]
        known.update(zip(made, indices, strict=True))
        Retrace().evaluate(self._computing, known)

        def start(by_tma: bool, predicate: Any) -> None:
            for copy, ref in zip(self._copies, self._refs, strict=True):
                if copy.by_tma is by_tma:
                    self._copy(copy, ref.at[slot], slot, known, predicate)

        if self._barrier is not None:
            if live is None:
                start(True, None)
            else:
                control.when(live)(lambda: start(True, None))
        start(False, live)

    def _copy(
        self, copy: Load, ref: Any, slot: Any, known: dict[Any, Any], predicate: Any
    ) -> None:
        source, eqn, fill = copy.source, copy.eqn, types.OOBFillMode
        options: dict[str, Any] = {}
        if not source.has_rows:
            masked = Loaded.of(eqn).mask is not None
            options["oob_mode"] = fill.ZEROS if masked else fill.PROMISE_IN_BOUNDS
            if not copy.by_tma:
                options["implementation"] = types.AsyncCopyImplementation.CP_ASYNC
        with _jax.at_line_of(eqn):
            tma.copy_gmem_to_smem(
                source.view(_reader(known)),
                ref,
                self._barrier.at[slot] if copy.by_tma else None,
                predicate=predicate,
                **options,
            )

    def _wait(self, slot: Any) -> None:
        if self._barrier is not None:
            mbarrier.barrier_wait(self._barrier.at[slot])
        groups = sum(not copy.by_tma for copy in self._copies)
        if groups:
            cp_async.wait_gmem_to_smem(groups * (self._stages - 2))

    # --- the body ---------------------------------------------------------------------

    def _known(self, i: Any, carry: Sequence[Any] = ()) -> dict[Any, Any]:
        """Returns the values of what an iteration starts with."""
        ins, n = self._jaxpr.invars, len(self._consts)
        known = dict(zip(self._jaxpr.constvars, self._own, strict=True))
        known.update(zip(ins[:n], self._consts, strict=True))
        known.update(zip(ins[n:-1], carry, strict=False))
        return {**known, ins[-1]: i}

    def _step(self, i: Any, slot: Any, carry: Sequence[Any]) -> list[Any]:
        known, trace = self._known(i, carry), Retrace()
        slots = {
            id(copy.eqn): ref
            for copy, ref in zip(self._copies, self._refs, strict=True)
        }
        for eqn in self._rest:
            ref = slots.get(id(eqn))
            if ref is None:
                trace.evaluate([eqn], known)
                continue
            with _jax.at_line_of(eqn):
                known[eqn.outvars[0]] = _read(eqn, ref.at[slot], known)
        return values_of(self._jaxpr.outvars, known)

    # --- what carries copies ----------------------------------------------------------

    def _chosen(self) -> list[Load]:
        """Returns the copies; loads that nothing copies asynchronously are refused.

        What is only an index of other loads is loaded before them.
        """
        copies: list[Load] = []

        def try_all(*inputs: Any) -> None:
            known = dict(zip(self._jaxpr.invars, inputs, strict=True))
            known.update(zip(self._jaxpr.constvars, self._own, strict=True))
            Retrace().evaluate(self._body.slice_of(self._body.loads), known)
            for load in list(self._body.loads):
                try:
                    by_tma = self._is_by_tma(load, _reader(known))
                    copies.append(dataclasses.replace(load, by_tma=by_tma))
                except stages.RefusedError as why:
                    self._body.refuse(load, str(why))

        _jax.trace(try_all, [v.aval for v in self._jaxpr.invars])
        left = {id(e) for e in self._body.without(copies)}
        return [copy for copy in copies if id(copy.eqn) in left]

    def _is_by_tma(self, load: Load, read: Callable[[Any], Any]) -> bool:
        """Returns whether TMA carries the copy; raises if nothing does."""
        # The second one: the first of all is aligned to more than others.
        slot = types.RefView(_declaration(load, 2).to_ref(), ()).at[1]
        view, what = load.source.view(read), "copy_gmem_to_smem"
        if load.source.has_rows:
            if scope.in_warp():
                raise stages.RefusedError("copies of rows are issued by a warpgroup")
            found = rows.split(view, what)
            assert found is not None
            sides = (rows.row(_engines.Side.of(x)) for x in (found[0], slot))
            _require_asynchronous(*sides)
            return False
        _require_asynchronous(*map(_engines.Side.of, (view, slot)))
        several = self._mesh.warpgroups > 1 and not scope.in_warp()
        # What threads have stored another proxy does not see without a fence.
        if several or load.is_written:
            return False
        in_bounds = Loaded.of(load.eqn).mask is None
        return not _engines.threads_load(
            view, slot, True, None, None, what, in_bounds=in_bounds
        )


def _require_asynchronous(gmem: _engines.Side, smem: _engines.Side) -> None:
    starts = gmem.window.starts

    def plan(divisors: Sequence[int]) -> Any:
        known = dataclasses.replace(gmem, window=gmem.window.at(starts, divisors))
        return _engines.check_threads(known, smem, store=False)

    try:
        found = plan([*map(multiples.start_divisor, starts)])
        if found.is_asynchronous:
            return
        promised = plan([x if isinstance(x, int) else _PROMISED for x in starts])
    except errors.LayoutError as error:
        raise stages.RefusedError(error.what) from None
    why = f"{found.chunk_bytes} bytes only, and cp.async copies 4, 8 or 16"
    if promised.is_asynchronous:
        why = (
            f"it is known to start at multiples of {why}: promise more with multiple_of"
        )
    else:
        why = f"elements that are adjacent and aligned are {why}"
    raise stages.RefusedError(why)


# What a start may be a multiple of.
_PROMISED = 1 << 10


def _declaration(load: Load, slots: int) -> types.ScratchType:
    """Declares buffers: in tiles of the tensor core if it may read them."""
    shape, dtype = tuple(load.result.shape), load.result.dtype
    bits, transforms = types.itemsize_bits(dtype), tuple[Any, ...]()
    in_tiles = len(shape) == 2 and shape[0] % 8 == 0 and shape[1] * bits % 256 == 0
    if load.is_multiplied and in_tiles and bits >= 8:
        swizzle = types.find_swizzle(shape[1] * bits)
        transforms = (
            types.TilingTransform((8, swizzle * 8 // bits)),
            types.SwizzleTransform(swizzle),
        )
    declared = types.SMEM((slots, *shape), dtype, transforms=transforms)
    return declared.as_internal()


def _reader(known: dict[Any, Any]) -> Callable[[Any], Any]:
    """Returns a function from variables and literals to values; scalars to numbers."""

    def read(atom: Any) -> Any:
        (value,) = values_of([atom], known)
        is_number = not _jax.is_tracer(value) and np.ndim(value) == 0
        return int(value) if is_number and not _is_ref(value) else value

    return read


def _is_ref(x: Any) -> bool:
    return types.base_aval(x) is not None


def _read(eqn: _jax.JaxprEqn, slot: types.RefView, known: dict[Any, Any]) -> Any:
    """Reads a buffer as the body loads the array."""
    params, loaded = eqn.params, Loaded.of(eqn)
    layout, optimized = params.get("layout"), params.get("optimized")
    if layout is None and optimized is None:
        value = slot.get()
    else:
        value = registers.load(slot, layout=layout, optimized=optimized)
    if loaded.mask is None:
        return value
    mask, *rest = values_of(loaded.selecting, known)
    other = rest[0] if rest else 0
    return jnp.where(mask, value, jnp.asarray(other, value.dtype))
