# SPDX-License-Identifier: Apache-2.0
"""Effects of the masks, orders and scopes of atomic operations.

Rows of the table of tests/public/test_effects.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pallas_gpu as plgpu
from tests.support import effects as see

# Each with a reference whose elements it has.
ATOMICS = {
    **dict.fromkeys(("atomic_add", "atomic_max", "atomic_min", "atomic_xchg"), "o"),
    **dict.fromkeys(("atomic_and", "atomic_or", "atomic_xor"), "n"),
}

EFFECTS: dict[str, Callable[[], list[str]]] = {
    **{
        f"{name}.mask": lambda name=name, ref=ref: see.bodies(
            *(
                lambda e, n=n: getattr(plgpu, name)(
                    getattr(e, ref).at[0], 0, mask=getattr(e, ref)[0] > n
                )
                for n in (0, 1)
            )
        )
        for name, ref in ATOMICS.items()
    },
    "atomic_cas.mask": lambda: see.bodies(
        *(
            lambda e, n=n: plgpu.atomic_cas(e.n.at[0], 0, 1, mask=e.n[0] > n)
            for n in (0, 1)
        )
    ),
    **{
        f"{name}.{option}": lambda name=name, ref=ref, option=option, other=other: (
            see.bodies(
                lambda e: getattr(plgpu, name)(getattr(e, ref).at[0], 0),
                lambda e: getattr(plgpu, name)(
                    getattr(e, ref).at[0], 0, **{option: other}
                ),
            )
        )
        for name, ref in ATOMICS.items()
        for option, other in (("sem", "acq_rel"), ("scope", "sys"))
    },
    **{
        f"atomic_cas.{option}": lambda option=option, other=other: see.bodies(
            lambda e: plgpu.atomic_cas(e.n.at[0], 0, 1),
            lambda e: plgpu.atomic_cas(e.n.at[0], 0, 1, **{option: other}),
        )
        for option, other in (("sem", "acq_rel"), ("scope", "sys"))
    },
}
