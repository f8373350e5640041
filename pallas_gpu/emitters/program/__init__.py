# SPDX-License-Identifier: Apache-2.0
"""The finished kernel as a whole: order of its operations, its end, passes over it."""
