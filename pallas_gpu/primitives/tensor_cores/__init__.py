# SPDX-License-Identifier: Apache-2.0
"""Operations of the tensor cores, a file per family."""
