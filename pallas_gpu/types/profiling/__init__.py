# SPDX-License-Identifier: Apache-2.0
"""What a profiled kernel records: events of its warpgroups or warps, and their words.

A trace is what one warpgroup, or one warp, of a CTA records: a header and events, all
32-bit words. An event has two: its tag, a number of a name with `END` at the end of a
span, and the lower half of the SM's clock. The header relates that clock to the time of
the device.
"""
