# SPDX-License-Identifier: Apache-2.0
"""Checks of kernels: a verdict as an object, on the command line, in pytest."""
