# SPDX-License-Identifier: Apache-2.0
"""Scripts of this repository, which are not part of the distribution."""
