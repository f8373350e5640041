# SPDX-License-Identifier: Apache-2.0
"""Measurements with the peer in the same run."""
