# SPDX-License-Identifier: Apache-2.0
"""Scripts of this repository. None of them is part of the distribution."""
