# SPDX-License-Identifier: Apache-2.0
"""The same kernels through our lowering and through upstream's, compared in PTX."""
