# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows, each with a matrix of its own: mixture of experts."""
