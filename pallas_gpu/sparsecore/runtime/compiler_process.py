# SPDX-License-Identifier: Apache-2.0
"""What the child process that compiles for TPUs does; see `runtime.worker_process`.

libtpu reads its flags once, when it is loaded, and may end the process. It writes what
it makes to the folder in `LIBTPU_DUMPS`, from which each kernel's files are
taken. The file does not import the package.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_VARIABLE = "LIBTPU_DUMPS"
# Programs of XLA's own, before and after each kernel.
_FRAME = ("sc-start", "sc-init", "sc-cleanup")
_STAMPS = re.compile(r"^\d+-\d+-mosaic-dump-|_\d{10,}")
_SUFFIXES = (".bundles", ".ll", ".txt", ".s", "")


class Compiler:
    """JAX with the compile-only devices of libtpu."""

    def __init__(self, _: Any):
        import jax
        from jax.experimental import topologies

        self._jax = jax
        self._topologies = topologies
        self._shardings: dict[str, Any] = {}
        self._dumps = Path(os.environ[_VARIABLE])

    def compile(
        self,
        topology: str,
        calls: list[dict[str, Any]],
        operands: list[tuple[tuple[int, ...], str]],
        results: list[tuple[tuple[int, ...], str]],
    ) -> dict[str, Any]:
        """Compiles the calls of one kernel; returns the compiler's texts.

        Args:
          topology: libtpu's name of a machine.
          calls: `config`, the text of a call's configuration, and the positions of its
            `operands` and `results` among those of the kernel.
          operands: shape and dtype of each operand.
          results: likewise.
        """
        jax = self._jax
        outs = [self._type(*result) for result in results]

        def program(*args: Any) -> Any:
            made: list[Any] = [None] * len(outs)
            for call in calls:
                values = jax.ffi.ffi_call(
                    "tpu_custom_call",
                    [outs[i] for i in call["results"]],
                    custom_call_api_version=1,
                    has_side_effect=True,
                    legacy_backend_config=call["config"],
                )(*(args[i] for i in call["operands"]))
                for i, value in zip(call["results"], values, strict=True):
                    made[i] = value
            return made

        sharding = self._sharding(topology)
        avals = [self._type(*operand, sharding=sharding) for operand in operands]
        self._clear()
        jitted = jax.jit(program, out_shardings=sharding, keep_unused=True)
        lowered = jitted.trace(*avals).lower(lowering_platforms=("tpu",))
        compiled = lowered.compile()
        return {
            "hlo": compiled.as_text(),
            "code_bytes": compiled.memory_analysis().generated_code_size_in_bytes,
            "bundles": self._texts("bundles"),
            "llvm": self._texts("llvm"),
            "passes": self._texts("mosaic"),
        }

    def _sharding(self, topology: str) -> Any:
        if topology not in self._shardings:
            import numpy as np

            # With Explicit axes, JAX's own kernels fail.
            jax = self._jax
            machine = self._topologies.get_topology_desc(
                platform="tpu", topology_name=topology
            )
            mesh = jax.sharding.Mesh(
                np.array(machine.devices[:1]),
                ("device",),
                axis_types=(jax.sharding.AxisType.Auto,),
            )
            whole = jax.sharding.PartitionSpec()
            self._shardings[topology] = jax.sharding.NamedSharding(mesh, whole)
        return self._shardings[topology]

    def _type(self, shape: tuple[int, ...], dtype: str, **kw: Any) -> Any:
        jnp = self._jax.numpy
        return self._jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), **kw)

    def _clear(self) -> None:
        for file in self._dumps.glob("*/*"):
            file.unlink()

    def _texts(self, kind: str) -> list[tuple[str, str]]:
        files = sorted((self._dumps / kind).glob("*"), key=lambda f: f.stat().st_mtime)
        return [
            (_STAMPS.sub("", file.name), file.read_text(errors="replace"))
            for file in files
            if not file.name.startswith(_FRAME) and file.suffix in _SUFFIXES
        ]
