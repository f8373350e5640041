# SPDX-License-Identifier: Apache-2.0
"""Kernels for the SparseCores of TPUs."""
