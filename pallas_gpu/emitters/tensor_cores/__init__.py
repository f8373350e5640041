# SPDX-License-Identifier: Apache-2.0
"""Instructions of the tensor cores, a file per family."""
