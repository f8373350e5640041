# SPDX-License-Identifier: Apache-2.0
"""Parts of the arguments of copies: what several of the public functions check."""
