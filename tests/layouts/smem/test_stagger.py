# SPDX-License-Identifier: Apache-2.0
"""Which lanes exchange what they access, and which need not."""

from __future__ import annotations

from pallas_gpu.layouts.smem.address import AddressForm
from pallas_gpu.layouts.smem.stagger import find_staggers


def test_lanes_that_access_one_word_have_no_conflict():
    columns = 2, 4, 8, 16, 32
    form = AddressForm(columns, (0,) * 5, (0,), (0,), 128)
    assert find_staggers(form, range(5), 2, [None] * 5) == (form, ())
