# SPDX-License-Identifier: Apache-2.0
"""Layouts for a kernel of the warpgroup level: registers, tilings and swizzles."""
