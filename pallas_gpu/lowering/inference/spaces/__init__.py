# SPDX-License-Identifier: Apache-2.0
"""The layouts of arrays in a memory space, and what each use of one requires."""
