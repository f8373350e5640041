# SPDX-License-Identifier: Apache-2.0
"""Arrays without contents: for results, and those that a launch adds."""
