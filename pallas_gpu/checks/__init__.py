# SPDX-License-Identifier: Apache-2.0
"""The checks of a complete program that no single family has."""
