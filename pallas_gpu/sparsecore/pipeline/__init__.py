# SPDX-License-Identifier: Apache-2.0
"""`emit_pipeline`: a loop over blocks whose copies overlap the body's work."""
