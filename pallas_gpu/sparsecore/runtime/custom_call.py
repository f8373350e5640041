# SPDX-License-Identifier: Apache-2.0
"""The custom call that runs a module on SparseCores: `tpu_custom_call`."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any, Literal

Tiling = Literal["compact", "sparsecore"]
_TILINGS = {"compact": "TILING_COMPACT", "sparsecore": "TILING_SPARSE_CORE"}


@dataclasses.dataclass(frozen=True)
class CustomCall:
    """One call: its configuration, and which arrays of the kernel it has.

    Attributes:
      config: the text that the call carries.
      operands: the positions of its operands among those of the kernel.
      results: the positions of its results among those of the kernel.
    """

    config: str
    operands: tuple[int, ...]
    results: tuple[int, ...]


def config_text(
    bytecode: bytes,
    *,
    cores: int,
    tiling: Tiling = "compact",
    opt_level: str = "O3",
    **switches: bool,
) -> str:
    """Returns the configuration of a call.

    Args:
      bytecode: a serialized module.
      cores: SparseCores that run it: the size of its first axis. libtpu ends the
        process where the chip has fewer.
      tiling: of arrays in HBM and VMEM.
      opt_level: of LLVM. Only at O3 every libtpu pipelines loops; O0 aborts libtpu.
      switches: others of libtpu's configuration, such as `skip_device_barrier`.
    """
    call: dict[str, Any] = {
        "body": base64.b64encode(bytecode).decode(),
        "serialization_format": 1,
        **{name: True for name, is_on in switches.items() if is_on},
    }
    config = {
        "custom_call_config": call,
        "sparse_core_config": {
            "tiling": _TILINGS[tiling],
            "comp_env": {"backend_opt_level": opt_level},
        },
        "device_type": "DEVICE_TYPE_SPARSECORE",
        "megachip_parallelism_config": {"cores": [str(i) for i in range(cores)]},
    }
    return json.dumps(config)
