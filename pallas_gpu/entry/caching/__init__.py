# SPDX-License-Identifier: Apache-2.0
"""What a kernel keeps of its calls, and when it is out of date."""
