# SPDX-License-Identifier: Apache-2.0
"""The words of a trace, which kernels write and the host reads."""

# The bit of a tag that says that a span ends; the others are the number of its name.
END = 1 << 31
EVENT_WORDS = 2
EVENT_BYTES = 4 * EVENT_WORDS
SPAN_BYTES = 2 * EVENT_BYTES
# The header: time in ns and clock in cycles, 64 bits each, before the first event and
# behind the last one; the number of the SM; the number of events, with those that found
# no room; what the clock counts.
FIRST_TIME, FIRST_CLOCK, LAST_TIME, LAST_CLOCK = 0, 2, 4, 6
SM, COUNT, UNIT = 8, 9, 10
HEADER_WORDS = 12
# What a clock counts: cycles, or events of the emulator. 0: the CTA has not run.
CYCLES, EVENTS = 1, 2
