# SPDX-License-Identifier: Apache-2.0
"""Measurement of kernels: device times, reports, a cost model, and tuning."""

from pallas_gpu.testing.bench import do_bench, kernel_times

__all__ = ["do_bench", "kernel_times"]


def __dir__() -> list[str]:
    return sorted(__all__)
