# SPDX-License-Identifier: Apache-2.0
"""The recorder of events, as code that is written with emitters uses it."""

from __future__ import annotations

import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_gpu.emitters.debug.profiler import Recorder
from pallas_gpu.timeline import Described, Profile, Record
from pallas_gpu.types import Recording, SpanNames, TraceScope


@pytest.mark.parametrize("scope", TraceScope)
def test_spans_begin_and_end_in_loops_and_branches(run_kernel, scope):
    recording = Recording(8, scope)
    names = SpanNames()

    def body(kb, _):
        recorder = Recorder(recording, kb.buffers[0], kb.i32(0), names)
        recorder.begin("all")
        index = ir.IndexType.get()
        loop = scf.ForOp(*(arith.constant(index, n) for n in (0, 3, 1)))
        with ir.InsertionPoint(loop.body):
            recorder.begin("step")
            recorder.end("step")
            scf.yield_([])
        equal = arith.cmpi(arith.CmpIPredicate.eq, kb.threads.warpgroup, kb.i32(1))
        branch = scf.IfOp(equal)
        with ir.InsertionPoint(branch.then_block):
            recorder.begin("second")
            recorder.end("second")
            scf.yield_([])
        recorder.end("all")
        recorder.stop()

    traces = np.zeros((1, recording.traces(2), recording.words), np.uint32)
    (words,) = run_kernel(body, [], [traces], threads=256)
    described = Described("k", names.known(), recording, (1,), None, True)
    found = Profile([Record(described, words)])
    lanes = recording.traces(2)
    for lane in range(lanes):
        spans = found.spans[found.spans["lane"] == lane]
        steps = [("all", 0), *[("step", 1)] * 3]
        second = [("second", 1)] if lane >= lanes // 2 else []
        assert [(s["name"], int(s["depth"])) for s in spans] == steps + second


def test_two_marks_are_no_common_subexpression(build):
    def body(kb, _):
        recording = Recording(2, TraceScope.WARPGROUP)
        recorder = Recorder(recording, kb.buffers[0], kb.i32(0), SpanNames())
        recorder.begin("one")
        recorder.begin("one")

    traces = np.zeros((1, 1, 20), np.uint32)
    text = str(build(body, [], [traces]))
    assert text.count("%clock;") == 2
