# SPDX-License-Identifier: Apache-2.0
"""Rules of synchronization between the CTAs of a grid, a file per family."""
