# SPDX-License-Identifier: Apache-2.0
"""Benchmarks; each measures a comparable implementation in the same run."""
