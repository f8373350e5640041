# SPDX-License-Identifier: Apache-2.0
"""What shares memory in a kernel, what orders its accesses, what the launch adds."""
