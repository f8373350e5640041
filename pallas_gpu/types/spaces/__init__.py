# SPDX-License-Identifier: Apache-2.0
"""What declarations occupy: a small class for each memory space."""
