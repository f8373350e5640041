# SPDX-License-Identifier: Apache-2.0
"""Copies, barriers, clusters, memory, grids: what holds each feature, row by row.

The rows of an operation are in the table FEATURES of its test file.
"""

import functools

from tests.support import beside
from tests.support.features.refused import REFUSED as REFUSED
from tests.support.features.row import Row
from tests.support.features.shared import ROWS as _SHARED


@functools.cache
def rows() -> tuple[Row, ...]:
    """All rows."""
    tables = [(m.__name__, table) for m, table in beside.declared("FEATURES")]
    own = [row.of(name) for name, table in tables for row in table]
    return (*_SHARED, *own)
