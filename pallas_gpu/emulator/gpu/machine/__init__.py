# SPDX-License-Identifier: Apache-2.0
"""The emulated machine: devices, clusters, CTAs, and the launch of a kernel on it."""
