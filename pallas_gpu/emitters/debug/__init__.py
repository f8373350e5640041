# SPDX-License-Identifier: Apache-2.0
"""Printed lines and checks."""
