# SPDX-License-Identifier: Apache-2.0
"""Measurement of kernels: device times, reports, a cost model, and tuning."""

from pallas_gpu.testing.autotune import Autotuned, autotune
from pallas_gpu.testing.bench import do_bench, kernel_times
from pallas_gpu.testing.cost import Estimate
from pallas_gpu.testing.measure import measure
from pallas_gpu.testing.perf_report import (
    Benchmark,
    PerfReport,
    PerfTable,
    perf_report,
)
from pallas_gpu.testing.profile import profile
from pallas_gpu.testing.rank import rank
from pallas_gpu.testing.tuning.report import TunedConfig, TuningReport

__all__ = [
    "Autotuned",
    "Benchmark",
    "Estimate",
    "PerfReport",
    "PerfTable",
    "TunedConfig",
    "TuningReport",
    "autotune",
    "do_bench",
    "kernel_times",
    "measure",
    "perf_report",
    "profile",
    "rank",
]


def __dir__() -> list[str]:
    return sorted(__all__)
