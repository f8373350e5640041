# SPDX-License-Identifier: Apache-2.0
"""One element, or the vector of one register: types, arithmetic, conversions, words."""
