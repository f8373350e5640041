# SPDX-License-Identifier: Apache-2.0
"""Copies: instructions of tensor copies, and copies without a tensor map."""
