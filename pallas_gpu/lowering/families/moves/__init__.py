# SPDX-License-Identifier: Apache-2.0
"""Families of operations that move elements between threads."""
