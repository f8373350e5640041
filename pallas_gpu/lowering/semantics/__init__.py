# SPDX-License-Identifier: Apache-2.0
"""Lane and Warpgroup semantics as objects behind one protocol."""
