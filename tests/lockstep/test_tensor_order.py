# SPDX-License-Identifier: Apache-2.0
"""What orders tcgen05 instructions of two warpgroups: each piece is needed.

The kernel is the one whose mutants the emulator reports; here pieces of its module are
missing. Of two fences in a row before one arrival each does, so both are left out.
"""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.engine import DeadlockError
from tests.support.lockstep import faults
from tests.support.mutations.mutant import Switches
from tests.support.mutations.tensor_cores.tensor_core import SUBJECT
from tests.support.semantics import BOTH, under

LAUNCH = SUBJECT.make(Switches())
FENCE, WAIT = "nvvm.tcgen05.fence", "nvvm.tcgen05.wait"
COMMIT, PARITY = "nvvm.tcgen05.commit", "nvvm.mbarrier.try_wait.parity"
UNKNOWN = "not known to be ordered before it"
# In the order of the module: the warpgroup that stages comes first. It has the fences
# of commit_tmem and the first arrival (0 to 2), of the first result (3 to 5), of the
# second arrival (6), of the second result (7 to 9). The other one has those after its
# waits (10, 11).
MISSING = {
    "fences before the first arrival": (
        faults.drop(FENCE, 0, 2),
        PtxError,
        UNKNOWN,
    ),
    "fence after the first product": (faults.drop(FENCE, 3), PtxError, UNKNOWN),
    "fences before the second arrival": (
        faults.drop(FENCE, 4, 6),
        PtxError,
        UNKNOWN,
    ),
    "fence after the second product": (
        faults.drop(FENCE, 7),
        PtxError,
        UNKNOWN,
    ),
    "fence after the first wait": (faults.drop(FENCE, 10), PtxError, UNKNOWN),
    "fence after the second wait": (faults.drop(FENCE, 11), PtxError, UNKNOWN),
    "wait for the store": (
        faults.drop(WAIT, 0),
        PtxError,
        "still being written",
    ),
    "wait for the load": (faults.drop(WAIT, 1), PtxError, "still being read"),
    "first commit": (faults.drop(COMMIT, 0), DeadlockError, "parity 0"),
    "second commit": (faults.drop(COMMIT, 1), DeadlockError, "parity 1"),
    "first proxy fence": (
        faults.drop("nvvm.fence.proxy", 0),
        PtxError,
        "without fence.proxy",
    ),
    "second proxy fence": (
        faults.drop("nvvm.fence.proxy", 1),
        PtxError,
        "without fence.proxy",
    ),
    "wait for the product": (faults.drop(PARITY, 1), PtxError, "TMEM"),
    "wait for the fetch": (faults.drop(PARITY, 2), PtxError, "still writes"),
    "wait for the operands": (faults.drop(PARITY, 3), PtxError, "have met"),
    "allocation": (faults.drop("nvvm.tcgen05.alloc"), PtxError, "TMEM"),
    "deallocation": (
        faults.drop("nvvm.tcgen05.dealloc"),
        PtxError,
        "not freed",
    ),
}


@pytest.mark.parametrize("semantics", BOTH)
def test_without_a_fault_the_kernel_is_right(semantics):
    result = faults.run(under(semantics, LAUNCH.call(None)), LAUNCH.arguments)
    np.testing.assert_array_equal(result, LAUNCH.expected)


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize(("fault", "error", "text"), MISSING.values(), ids=MISSING)
def test_what_is_missing_is_reported(fault, error, text, semantics):
    kernel = under(semantics, LAUNCH.call(None))
    with pytest.raises(error, match=text):
        faults.run(kernel, LAUNCH.arguments, fault)
