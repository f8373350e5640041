# SPDX-License-Identifier: Apache-2.0
"""Who chooses the layouts of arrays: the author, or inference."""
