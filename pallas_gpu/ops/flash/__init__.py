# SPDX-License-Identifier: Apache-2.0
"""Attention without scores in memory: forward, backward and decode."""
