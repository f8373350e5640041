# SPDX-License-Identifier: Apache-2.0
"""Kernels of several devices, with what they compute."""
