# SPDX-License-Identifier: Apache-2.0
"""What becomes of values that kernels do not have, where a body is traced again."""
