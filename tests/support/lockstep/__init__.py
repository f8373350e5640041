# SPDX-License-Identifier: Apache-2.0
"""The GPU as the PTX ISA describes it, for emitted modules on a CPU; a file per unit.

Warps of a strand take each step together. Whether a kernel waits, fences and signals
as it must is checked; asynchronous work completes as late as the waits allow.
"""
