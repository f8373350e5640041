# SPDX-License-Identifier: Apache-2.0
"""Accesses to single elements: with an index for each of them, and atomic ones."""
