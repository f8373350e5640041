# SPDX-License-Identifier: Apache-2.0
"""From an author's function to a call of a kernel.

`trace` makes a checked body of it: arguments, what it captures, keys and other things
that kernels lack replaced. `call` is the launch as an operation of JAX. `kernel` joins
them; the other entry points are what bodies call, such as `run_scoped`, `when`, `loop`.
"""
