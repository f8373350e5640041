# SPDX-License-Identifier: Apache-2.0
"""From an author's function to a call of a kernel for SparseCores."""
