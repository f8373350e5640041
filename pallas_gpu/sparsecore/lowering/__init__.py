# SPDX-License-Identifier: Apache-2.0
"""From a checked kernel to a module: SparseCores as a machine of the compiler.

Importing this package registers the machine and its rules.
"""

from pallas_gpu.sparsecore.lowering import families as families
from pallas_gpu.sparsecore.lowering import machine as machine
