# SPDX-License-Identifier: Apache-2.0
"""The memory of other devices: its addresses, and accesses to that of all devices."""
