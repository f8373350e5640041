# SPDX-License-Identifier: Apache-2.0
"""The tiers of the tests: what is measured of each test, and how a tier is chosen."""
