# SPDX-License-Identifier: Apache-2.0
"""From a finished module to XLA's custom call, or to PTX and SASS with no GPU."""
