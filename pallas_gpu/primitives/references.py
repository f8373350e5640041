# SPDX-License-Identifier: Apache-2.0
"""JAX's own reads and writes of references, described to the registry.

The other operations of JAX that a kernel supports compute values: they have rules, and
need no description.
"""

from __future__ import annotations

from pallas_gpu import _jax
from pallas_gpu.primitives import _registry as registry

registry.describe(_jax.get_p, "references", reads=("ref",))
registry.describe(_jax.swap_p, "references", reads=("ref",), writes=("ref",))
registry.describe(_jax.addupdate_p, "references", reads=("ref",), writes=("ref",))
