# SPDX-License-Identifier: Apache-2.0
"""The backward pass of attention, on Hopper."""
