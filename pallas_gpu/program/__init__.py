# SPDX-License-Identifier: Apache-2.0
"""The normal form of a kernel, made from its jaxpr once: operations over values."""
