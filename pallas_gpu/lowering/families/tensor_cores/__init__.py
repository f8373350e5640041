# SPDX-License-Identifier: Apache-2.0
"""Rules of the tensor cores, a file per family."""
