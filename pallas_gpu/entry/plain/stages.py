# SPDX-License-Identifier: Apache-2.0
"""Which loads of a loop's body can be copies that are issued iterations before.

Those whose indices are known before the iteration: they depend on the loop's index, on
what the loop does not change, and on values that are loaded from memory that the loop
neither writes nor waits for. What computes the indices is the slice of a load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from pallas_gpu import _jax, errors, types
from pallas_gpu.checks import references
from pallas_gpu.entry.plain import sources
from pallas_gpu.entry.plain.sources import Loaded
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.bodies import Equations
from pallas_gpu.program.nodes import Op
from pallas_gpu.program.rewrite import variables
from pallas_gpu.program.walk import Site, walk

_SPACES = (types.GMEM, types.SMEM)
# Waits for what is in registers.
_OF_REGISTERS = ("wgmma_wait", "wait_load_tmem")
# After it a kernel sees what the one before has written, its inputs.
_OF_INPUTS = "griddepcontrol_wait"


@dataclasses.dataclass(frozen=True)
class Load:
    """A load that a copy can replace.

    Attributes:
      eqn: the load.
      source: what it reads.
      is_written: whether the kernel writes the reference, outside of the loop.
      is_multiplied: whether products of matrices are all that reads the result.
      by_tma: whether TMA carries the copy, once that is known.
    """

    eqn: _jax.JaxprEqn
    source: sources.Source
    is_written: bool
    is_multiplied: bool
    by_tma: bool = False

    @property
    def result(self) -> Any:
        """The type of the array that it loads."""
        return self.eqn.outvars[0].aval


class RefusedError(Exception):
    """Why a load cannot be a copy ahead."""


class LoopBody:
    """The body of a loop, without calls: consts, carries and the index are its inputs.

    Attributes:
      loads: those that a copy can replace.
      refused: the other loads of arrays in GMEM, each with the reason.
      carried: the results of the body.
    """

    def __init__(
        self, closed: _jax.ClosedJaxpr, written: Sequence[bool], authors: _jax.Jaxpr
    ):
        """Analyses a body.

        Args:
          closed: the body.
          written: for each input that is a const whether the kernel writes it.
          authors: the body as it was written, whose inner loops copy nothing ahead.
        """
        self._jaxpr = closed.jaxpr
        self._body = Equations(self._jaxpr)
        self.equations = self._body.listed
        self._makers = {v: self.equations[i] for v, i in self._body.made.items()}
        index = self._jaxpr.invars[-1]
        consts = self._jaxpr.invars[: len(written)]
        self._invariant = {*consts, *self._jaxpr.constvars, index}
        self._written = dict(zip(consts, written, strict=True))
        self._sites = walk(closed)
        self.carried = self._jaxpr.outvars
        self._waits = [x for x in walk(authors) if _acquires(x.op)]
        self._own_writes = references.written(closed)
        self._slices: dict[int, frozenset[int]] = {}
        self.loads: list[Load] = []
        self.refused: list[tuple[Site, str]] = []
        for site in self._sites:
            if _loads_array(site.op):
                self._enter(site)

    def refuse(self, load: Load, why: str) -> None:
        """Moves a load to those that are refused."""
        self.loads.remove(load)
        (site,) = (x for x in self._sites if x.eqn is load.eqn)
        self.refused.append((site, why))

    def refuse_all(self, why: str) -> None:
        """Moves all loads to those that are refused."""
        for load in list(self.loads):
            self.refuse(load, why)

    def left(self) -> list[tuple[str, str]]:
        """Returns the lines of the loads that are refused, each with the reason."""
        return [(site.where, why) for site, why in self.refused if site.where]

    def slice_of(self, loads: Iterable[Load]) -> list[_jax.JaxprEqn]:
        """Returns the equations that compute the indices of loads, in order."""
        atoms = (x for load in loads for x in load.source.atoms)
        found = frozenset[int]().union(*map(self._slice, atoms))
        return [self.equations[i] for i in sorted(found)]

    def without(self, loads: Sequence[Load]) -> list[_jax.JaxprEqn]:
        """Returns the equations of the body, less those that only such loads need."""
        replaced = {id(load.eqn) for load in loads}
        live = set(variables(self._jaxpr.outvars))
        kept = []
        for eqn in reversed(self.equations):
            if _is_pure(eqn) and live.isdisjoint(eqn.outvars):
                continue
            kept.append(eqn)
            read = Loaded.of(eqn).selecting if id(eqn) in replaced else eqn.invars
            live.update(variables(read))
        return kept[::-1]

    # --- one load ---------------------------------------------------------------------

    def _enter(self, site: Site) -> None:
        try:
            self.loads.append(self._load(site))
        except RefusedError as why:
            self.refused.append((site, str(why)))

    def _load(self, site: Site) -> Load:
        if site.enclosing:
            inner = site.enclosing[-1].op.name
            raise RefusedError(f"it is in a {_CALLED.get(inner, inner)} in the body")
        eqn = site.eqn
        found = sources.source(eqn, self._makers)
        if found is None:
            raise RefusedError(
                "its indices name neither a part of the array nor rows of it"
            )
        self._require_unwritten(found.ref)
        # What a mask selects from is read to registers.
        is_multiplied = not Loaded.of(eqn).selecting and self._is_multiplied(eqn)
        load = Load(eqn, found, self._written[found.ref], is_multiplied)
        used = [*found.atoms, *(x for e in self.slice_of([load]) for x in e.invars)]
        if not any(x is self._jaxpr.invars[-1] for x in used):
            raise RefusedError("each iteration loads the same: load it before the loop")
        return load

    def _is_multiplied(self, eqn: _jax.JaxprEqn) -> bool:
        (var,) = eqn.outvars
        readers = [*self._body.readers(var)]
        return bool(readers) and all(
            i < len(self.equations)
            and (
                self.equations[i].primitive.name == "dot_general"
                or (
                    self.equations[i].primitive.name == "transpose"
                    and self._is_multiplied(self.equations[i])
                )
            )
            for i in readers
        )

    def _require_unwritten(self, ref: Any) -> None:
        """Raises RefusedError unless a reference can be read before the iteration."""
        if ref not in self._written:
            raise RefusedError("its reference is one of an iteration")
        if ref.aval.memory_space is None:
            raise RefusedError(
                "the kernel closes over its reference: pass it as an argument"
            )
        own = self._own_writes
        if self._written[ref]:
            # Two arguments of a function may be one reference.
            own = {ref if _is_alike(x, ref) else x for x in own}
        if references.may_be_among(ref, own):
            raise RefusedError("the loop writes the array that it loads")
        for site in self._waits:
            if self._written[ref] or site.op.name == _OF_INPUTS:
                raise RefusedError(
                    f"the loop waits by {registry.called(site.op.primitive)} "
                    f"({site.where}), perhaps for what writes the array"
                )

    def _slice(self, atom: Any) -> frozenset[int]:
        """Returns the positions of the equations that compute a value.

        Raises:
          RefusedError: it is not known before the iteration.
        """
        if isinstance(atom, _jax.Literal) or atom in self._invariant:
            return frozenset()
        i = self._body.position(atom)
        if i is None:
            raise RefusedError("its indices depend on the loop's carry")
        if i not in self._slices:
            self._slices[i] = self._slice_of_equation(i)
        return self._slices[i]

    def _slice_of_equation(self, i: int) -> frozenset[int]:
        eqn = self.equations[i]
        if eqn.primitive in sources.LOADS:
            ref = Loaded.of(eqn).ref
            try:
                self._require_unwritten(ref)
            except RefusedError as why:
                raise RefusedError(f"its indices are loaded, and {why}") from None
            if ref.aval.memory_space not in _SPACES:
                raise RefusedError(
                    "its indices depend on a register or on tensor memory"
                )
        elif not _is_pure(eqn):
            raise RefusedError(
                f"its indices depend on {registry.called(eqn.primitive)}"
            )
        own = frozenset([i])
        return own.union(*(self._slice(x) for x in eqn.invars if not _is_ref(x)))

    # --- errors -----------------------------------------------------------------------

    def nothing(self, num_stages: int, where: str | None) -> errors.PallasGpuError:
        """Returns the error that no load can be a copy ahead."""
        lines = [
            f"{types.describe(_accessed(site.op).buffer.aval)} at {site.where}: {why}"
            for site, why in self.refused
        ]
        got = "; ".join(dict.fromkeys(lines)) or "a body that loads no array from GMEM"
        change = "change the load"
        if not lines:
            change = "leave the array in GMEM: BlockSpec(memory_space=plgpu.GMEM)"
        return errors.UnsupportedError(
            f"loop: num_stages={num_stages}, and no load can be a copy ahead",
            expected="a load of an array in GMEM, with indices that depend on the "
            "loop's index, on values from before the loop and on loaded values",
            got=got,
            hint=f"leave num_stages out, or {change}",
            where=where,
        )


_CALLED = {"cond": "branch", "scan": "loop", "while": "loop", "run_scoped": "scope"}


def _accessed(op: Op) -> Any:
    return next(x for x in op.accesses if x.reads)


def _loads_array(op: Op) -> bool:
    """Whether an operation loads an array from GMEM."""
    if op.primitive not in sources.LOADS or not op.results[0].shape:
        return False
    # The memory of what a kernel closes over is not known yet: None.
    return any(x.space in (types.GMEM, None) for x in op.accesses)


def _acquires(op: Op) -> bool:
    """Whether the issuer may see what others have written, from an operation on."""
    operation = op.operation
    waits = operation is not None and operation.waits and op.name not in _OF_REGISTERS
    return waits or op.params.get("sem") in ("acquire", "acq_rel")


def _is_pure(eqn: _jax.JaxprEqn) -> bool:
    """Whether an equation only computes, or loads."""
    positions = (isinstance(x, _jax.NamedAxisEffect) for x in eqn.effects)
    return eqn.primitive in sources.LOADS or all(positions)


def _is_ref(x: Any) -> bool:
    return isinstance(x.aval, _jax.AbstractRef)


def _is_alike(*refs: Any) -> bool:
    """Whether references have one shape and type."""
    return len({(x.aval.shape, x.aval.dtype) for x in refs}) == 1
