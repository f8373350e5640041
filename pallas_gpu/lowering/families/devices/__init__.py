# SPDX-License-Identifier: Apache-2.0
"""Operations on the memory of all devices at once."""
