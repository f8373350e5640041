# SPDX-License-Identifier: Apache-2.0
"""Attention forward on Hopper: kernel, schedule, default configurations."""
