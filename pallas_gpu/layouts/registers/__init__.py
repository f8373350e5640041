# SPDX-License-Identifier: Apache-2.0
"""Register layouts: which thread keeps which element of an array, and where."""
