# SPDX-License-Identifier: Apache-2.0
"""Single elements and register vectors: types, arithmetic, conversions, words."""
