# SPDX-License-Identifier: Apache-2.0
"""Register layouts: the thread and the register of each element of an array."""
