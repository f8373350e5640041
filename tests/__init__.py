# SPDX-License-Identifier: Apache-2.0
"""The tests. Their folders mirror the package; `house/` checks the source itself."""
