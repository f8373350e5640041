# SPDX-License-Identifier: Apache-2.0
"""Products in the tensor cores, and their arithmetic."""
