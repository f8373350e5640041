# SPDX-License-Identifier: Apache-2.0
"""From a complete module to XLA's custom call, or to PTX and SASS without a GPU."""
