# SPDX-License-Identifier: Apache-2.0
"""What the arguments of copies are: reductions, parts for two CTAs."""
