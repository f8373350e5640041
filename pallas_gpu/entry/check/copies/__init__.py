# SPDX-License-Identifier: Apache-2.0
"""Checks of copies, a file per family."""
