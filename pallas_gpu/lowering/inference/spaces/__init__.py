# SPDX-License-Identifier: Apache-2.0
"""How arrays in a memory space may be stored, and what each use of one requires."""
