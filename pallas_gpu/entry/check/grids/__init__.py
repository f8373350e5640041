# SPDX-License-Identifier: Apache-2.0
"""Checks of launches: dynamic scheduling, cluster launch control."""
