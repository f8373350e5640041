# SPDX-License-Identifier: Apache-2.0
"""The steps of the tuner: trace, compile, check, measure, store; a file per step."""
