# SPDX-License-Identifier: Apache-2.0
"""Copies: what reductions compute, copies that a leader tracks."""
