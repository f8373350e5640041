# SPDX-License-Identifier: Apache-2.0
"""Loops and pipelines, implemented with the public names."""
