# SPDX-License-Identifier: Apache-2.0
"""Loops and pipelines written on the public names."""
