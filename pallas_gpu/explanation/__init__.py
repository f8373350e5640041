# SPDX-License-Identifier: Apache-2.0
"""Why kernels are slow: findings with lines, estimated times and advice."""
