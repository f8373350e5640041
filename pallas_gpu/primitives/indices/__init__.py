# SPDX-License-Identifier: Apache-2.0
"""What is known of indices, when they are traced and in programs."""
