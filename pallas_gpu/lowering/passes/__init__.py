# SPDX-License-Identifier: Apache-2.0
"""Passes over a program before it is planned: what is undefined, adjacent, checked."""
