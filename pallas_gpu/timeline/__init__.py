# SPDX-License-Identifier: Apache-2.0
"""Profiles of kernels: spans of their warpgroups as a table, a text and a picture."""

from pallas_gpu.timeline.profile import Profile as Profile
from pallas_gpu.timeline.profile import write_file as write_file
from pallas_gpu.timeline.record import Described as Described
from pallas_gpu.timeline.record import Record as Record
