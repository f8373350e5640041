# SPDX-License-Identifier: Apache-2.0
"""What grids do to each other."""
