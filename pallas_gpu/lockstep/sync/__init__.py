# SPDX-License-Identifier: Apache-2.0
"""Barriers, atomic operations, and strong accesses."""
