# SPDX-License-Identifier: Apache-2.0
"""Conversions between register layouts, and the cost model of data movement."""
