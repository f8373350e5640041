# SPDX-License-Identifier: Apache-2.0
"""JAX's own reads and writes of references: what `define` would say of them.

The other operations of JAX that a kernel may have compute values: they have rules, and
nothing more is to be said of them.
"""

from __future__ import annotations

from pallas_gpu import _jax
from pallas_gpu.primitives import _registry as registry

registry.describe(_jax.get_p, "references", reads=("ref",))
registry.describe(_jax.swap_p, "references", reads=("ref",), writes=("ref",))
registry.describe(_jax.addupdate_p, "references", reads=("ref",), writes=("ref",))
