# SPDX-License-Identifier: Apache-2.0
"""Emitted modules, run on the CPU: all threads of a block take each step together."""
