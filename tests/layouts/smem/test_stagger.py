# SPDX-License-Identifier: Apache-2.0
"""Which lanes exchange what they access, and which need not."""

from __future__ import annotations

from pallas_gpu.layouts.smem.address import AddressForm
from pallas_gpu.layouts.smem.stagger import Stagger, find_staggers


def test_lanes_that_access_one_word_have_no_conflict():
    columns = 2, 4, 8, 16, 32
    form = AddressForm(columns, (0,) * 5, (0,), (0,), 128)
    assert find_staggers(form, range(5), 2, [None] * 5) == (form, ())


def test_lanes_of_one_bank_take_the_registers_in_another_order():
    columns, turned = (4, 8, 16, 32, 128), (4, 8, 16, 32, 128 ^ 64)
    form = AddressForm(columns, (0,) * 5, (192, 128), (0, 0), 256)
    found = find_staggers(form, range(5), 4, [None] * 4 + [4])
    assert found == (form.replace(columns=turned), (Stagger(4, ((0, 1),)),))
