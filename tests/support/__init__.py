# SPDX-License-Identifier: Apache-2.0
"""What tests share: bodies run everywhere, refusals, random kernels, lockstep."""
