# SPDX-License-Identifier: Apache-2.0
"""How arrays get from one register layout into another, and what that costs."""
