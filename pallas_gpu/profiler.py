# SPDX-License-Identifier: Apache-2.0
"""The profiler under the names that it has upstream, in jax.experimental.mosaic.gpu."""

from pallas_gpu.testing.measure import measure as measure
from pallas_gpu.testing.profile import profile as profile
from pallas_gpu.timeline import Profile as Profile
from pallas_gpu.types import ProfilerSpec as ProfilerSpec
