# SPDX-License-Identifier: Apache-2.0
"""What a kernel does: a file per family with public functions, checks and types."""
