# SPDX-License-Identifier: Apache-2.0
"""Words of traces become spans in nanoseconds, for all SMs on one axis."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from pallas_gpu.timeline import Described, Profile, Record
from pallas_gpu.types import Recording, TraceScope
from pallas_gpu.types.profiling import trace
from tests.support.refusal import refused

NAMES = (("work", False), ("full[.]", True), ("step", False))
# A device that has been on for 50 years, with a clock of 2 GHz: half of the 64 bits.
NOW = 50 * 365 * 86_400 * 10**9
CLOCK = 5 * 2**32 - 600


def header(first, last, clock, sm=0, count=0, rate=2):
    words = np.zeros(trace.HEADER_WORDS, np.uint32)
    for word, value in (
        (trace.FIRST_TIME, NOW + first),
        (trace.LAST_TIME, NOW + last),
        (trace.FIRST_CLOCK, clock),
        (trace.LAST_CLOCK, clock + rate * (last - first)),
    ):
        words[word : word + 2] = value & 0xFFFFFFFF, value >> 32
    words[trace.SM], words[trace.COUNT], words[trace.UNIT] = sm, count, trace.CYCLES
    return words


def row(first, last, clock, *events, sm=0, dropped=0, space=8, rate=2):
    """A trace; an event is a tag, and the nanoseconds since its beginning."""
    words = np.zeros((2 * space, 2), np.uint32)
    for i, (tag, at) in enumerate(events):
        words[i] = tag, (clock + rate * at) % 2**32
    head = header(first, last, clock, sm, len(events) + dropped, rate)
    return np.concatenate([head, words.reshape(-1)])


def profile_of(*ctas, space=8, scope=TraceScope.WARPGROUP, modelled=False):
    """The profile of a launch with rows for the traces of each CTA."""
    described = Described(
        "k", NAMES, Recording(space, scope), (len(ctas),), "role", modelled
    )
    return Profile([Record(described, np.array(ctas))])


END = trace.END
# work from 100 to 900, in it a wait from 200 to 600.
EVENTS = ((0, 100), (1, 200), (1 | END, 600), (0 | END, 900))


def test_events_are_in_nanoseconds_also_where_the_clock_wraps():
    found = profile_of([row(0, 1000, CLOCK, *EVENTS)])
    work, wait = found.spans
    assert (work["name"], work["depth"], work["is_wait"]) == ("work", 0, False)
    assert (work["begin"], work["end"]) == (100, 900)
    assert (wait["name"], wait["depth"], wait["is_wait"]) == ("full[.]", 1, True)
    assert (wait["begin"], wait["end"]) == (200, 600)
    assert found.traces[["begin", "end"]].tolist() == [(0, 1000)]
    assert found.has_times


def test_sms_have_one_time_whatever_their_clocks_are():
    ctas = [
        [row(0, 1000, CLOCK, *EVENTS, sm=3)],
        [row(500, 1500, 17, *EVENTS, sm=4)],
        [row(1100, 2100, CLOCK + 2200, *EVENTS, sm=3)],
    ]
    found = profile_of(*ctas)
    assert found.spans["sm"].tolist() == [3, 3, 4, 4, 3, 3]
    np.testing.assert_allclose(
        found.spans["begin"], [100, 200, 600, 700, 1200, 1300], atol=1e-6
    )


def test_coarse_steps_of_the_devices_time_average_out():
    """Three CTAs on an SM: the clock says how far they are apart."""
    starts, clock = (0, 70, 131), 1000
    rows = [
        [row(s // 32 * 32, (s + 9600) // 32 * 32, clock + 2 * s, *EVENTS)]
        for s in starts
    ]
    begins = profile_of(*rows).spans["begin"][::2]
    np.testing.assert_allclose(np.diff(begins), np.diff(starts), rtol=0.01)


def test_the_clock_may_become_slower():
    long = tuple((tag, 100 * at) for tag, at in EVENTS)
    ctas = [
        [row(0, 100_000, CLOCK, *long)],
        [row(100_000, 200_000, CLOCK + 200_000, *long, rate=1)],
    ]
    found = profile_of(*ctas)
    expected = [10_000, 20_000, 110_000, 120_000]
    np.testing.assert_allclose(found.spans["begin"], expected, rtol=1e-6)


def test_a_trace_that_is_full_ends_its_spans_with_its_last_event():
    events = EVENTS[:2]
    found = profile_of([row(0, 1000, 0, *events, dropped=5, space=1)], space=1)
    assert found.spans["end"].tolist() == [200, 200]
    assert found.spans["is_complete"].tolist() == [False, False]
    assert found.traces["dropped"].tolist() == [5]


def test_launches_are_in_the_order_of_the_device():
    records = [
        Record(
            Described(
                name, NAMES, Recording(8, TraceScope.WARPGROUP), (1,), None, False
            ),
            np.array([[row(first, first + 1000, 7, *EVENTS)]]),
        )
        for name, first in (("late", 3000), ("early", 0))
    ]
    found = Profile(records)
    assert [x.kernel for x in found.launches] == ["early", "late"]
    assert found.traces["begin"].tolist() == [0, 3000]


# --- what it says ---------------------------------------------------------------------

# Eight spans of 10 ns, which fill a trace.
FULL = tuple((tag, 100 + 20 * i + 10 * (tag > 0)) for i in range(8) for tag in (0, END))
TWO = [
    [row(0, 1000, 0, *EVENTS), row(0, 1000, 0)],
    [row(1200, 2200, 2400, *EVENTS), row(1200, 2200, 2400, *FULL, dropped=3)],
]


def test_the_text_says_where_the_time_of_each_warpgroup_goes():
    assert str(profile_of(*TWO)) == (
        "kernel k: 2 CTAs on 1 SM, 2.2 µs; an SM has no CTA for 9 % of it\n"
        "  role 0: waits 40 % on `full[.]`; `work` 40 %, outside of spans 20 %\n"
        "  role 1: `work` 4 %, outside of spans 96 %\n"
        "  role 1 has dropped 3 events, behind the first 16 of each CTA: profile with "
        "more space"
    )
    assert repr(profile_of(*TWO)) == "<Profile of k: 12 spans>"
    assert str(Profile([])) == "no kernel was launched"


def test_the_file_has_a_thread_for_each_warpgroup_of_a_cta(tmp_path):
    path = tmp_path / "trace.json"
    profile_of(*TWO).save(path)
    found = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in found if e["ph"] == "X"]
    assert [(e["name"], e["cat"]) for e in spans[:2]] == [
        ("work", "scope"), ("full[.]", "wait"),
    ]  # fmt: skip
    # In microseconds.
    assert [(e["ts"], e["dur"]) for e in spans[:2]] == [(0.1, 0.8), (0.2, 0.4)]
    assert {e["pid"] for e in spans} == {1}
    threads = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert sorted(threads.values()) == [
        f"CTA {i} role {j}" for i in (0, 1) for j in (0, 1)
    ]
    assert {threads[e["tid"]] for e in spans} == {
        "CTA 0 role 0",
        "CTA 1 role 0",
        "CTA 1 role 1",
    }


def drawn(picture):
    """Texts, titles of boxes, and boxes of a picture."""
    root = ET.fromstring(picture)
    name = "{http://www.w3.org/2000/svg}"
    texts = [x.text for x in root.iter(f"{name}text")]
    titles = [x.text for x in root.iter(f"{name}title")]
    return texts, titles


def test_the_picture_has_a_lane_for_each_warpgroup_and_names_waits():
    texts, titles = drawn(profile_of(*TWO).svg())
    assert {"role 0", "role 1", "work", "full[.]", "wait for full[.]"} <= {*texts}
    assert "kernel k, SM 0" in texts
    # CTAs that follow each other share a lane.
    assert titles.count("wait for full[.]: 400 ns") == 2
    assert titles.count("CTA 0") == titles.count("CTA 1") == 2


def test_ctas_at_the_same_time_have_lanes_of_their_own():
    texts, _ = drawn(profile_of(*[[row(0, 1000, 0, *EVENTS)]] * 2).svg())
    assert {"role 0 (0)", "role 0 (1)"} <= {*texts}


@pytest.mark.parametrize("picture", [
    lambda p: p.svg(sm=1), lambda p: p.svg(between=(0, 50)),
])  # fmt: skip
def test_a_part_of_the_picture(picture):
    ctas = [[row(0, 1000, 0, *EVENTS)], [row(0, 1000, 0, sm=1)]]
    assert not any("wait" in x for x in drawn(picture(profile_of(*ctas)))[1])


def test_a_notebook_shows_picture_and_text():
    page = profile_of(*TWO)._repr_html_()
    assert page.startswith("<svg") and "waits 40 % on `full[.]`" in page


def test_events_on_a_cpu_are_no_times():
    found = profile_of(*TWO, modelled=True)
    assert not found.has_times
    assert "say nothing of times on a GPU" in str(found)
    assert "kernel k, events on the CPU in their order" in drawn(found.svg())[0]


@refused
def test_no_such_launch():
    profile_of(*TWO).svg(launch=1)  # HERE


@refused
def test_one_time_only():
    profile_of(*TWO).svg(between=3)  # HERE


@refused
def test_no_time():
    profile_of(*TWO).svg(between=(5, 0))  # HERE
