# SPDX-License-Identifier: Apache-2.0
"""Choices of a run: from a seed, or every order of its events up to equivalence."""
