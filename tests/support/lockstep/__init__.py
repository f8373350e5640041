# SPDX-License-Identifier: Apache-2.0
"""Kernels for `pallas_gpu.lockstep`: functions whose modules it runs, and faults."""
