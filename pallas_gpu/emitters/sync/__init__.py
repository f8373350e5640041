# SPDX-License-Identifier: Apache-2.0
"""Synchronization between the CTAs of a grid, as instructions."""
