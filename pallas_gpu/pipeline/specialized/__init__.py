# SPDX-License-Identifier: Apache-2.0
"""What a warp-specialised kernel consists of: rings, stores, roles, tiles."""
