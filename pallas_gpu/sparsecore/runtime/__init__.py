# SPDX-License-Identifier: Apache-2.0
"""From a module to libtpu's instruction bundles, and to a call from JAX."""
