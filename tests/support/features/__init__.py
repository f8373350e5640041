# SPDX-License-Identifier: Apache-2.0
"""Copies, barriers, clusters, memory, grids: what holds each feature, row by row."""

from tests.support.features.copies import ROWS as _COPIES
from tests.support.features.memory import ROWS as _MEMORY
from tests.support.features.refused import REFUSED as REFUSED
from tests.support.features.sync import ROWS as _SYNC

ROWS = (*_COPIES, *_SYNC, *_MEMORY)
