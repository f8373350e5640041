# SPDX-License-Identifier: Apache-2.0
"""The tensor cores, as bodies use them."""
