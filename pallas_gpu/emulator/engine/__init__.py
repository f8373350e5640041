# SPDX-License-Identifier: Apache-2.0
"""Runs jaxprs with effects: threads, asynchronous work, memories, and their order."""
