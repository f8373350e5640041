# SPDX-License-Identifier: Apache-2.0
"""The memory of other devices: references to it, and accesses to all at once."""
