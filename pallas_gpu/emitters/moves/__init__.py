# SPDX-License-Identifier: Apache-2.0
"""Exchange of values between threads: emitters of the plans of `layouts/moves/`."""
