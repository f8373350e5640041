# SPDX-License-Identifier: Apache-2.0
"""PyTorch: functions with kernels that take and return tensors.

torch is optional, and imported with the first function that is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol

from pallas_gpu import errors, expect

__all__ = ["TorchFunction", "as_torch_kernel"]

_POSITIONS = expect.integers(0)


class TorchFunction(Protocol):
    """A function of tensors: the result of `as_torch_kernel`."""

    def __call__(self, *args: Any) -> Any:
        """Calls it with tensors, or pytrees of them."""

    def custom_op(self, name: str, *example: Any) -> Callable[..., Any]:
        """Registers it with torch as an operation that `torch.compile` keeps.

        Args:
          name: `library::name`.
          example: arguments, tensors one by one. Others may have other shapes, but not
            another number, and the same ones of them are updated.

        Returns:
          A function that does the same, and is one operation in a compiled program.

        Raises:
          ArgumentError: the result is not a tensor, or a tuple or list of tensors.
        """
        ...

    def unload(self) -> None:
        """Releases what is compiled, except for what a CUDA graph has captured.

        So does the end of the function's life. A later call compiles again.
        """


@expect.arguments()
def as_torch_kernel(
    fn: Callable[..., Any],
    *,
    inout_argnums: Annotated[Sequence[int], _POSITIONS] = (),
) -> TorchFunction:
    """Turns a function that calls kernels into a function of PyTorch tensors.

    Tensors are passed without copies and kernels are launched on torch's current
    stream, also while a CUDA graph captures it. A combination of shapes, dtypes and
    devices is compiled by its first call. On a CPU kernels run in the emulator. Where
    JAX can differentiate `fn`, e.g. by its `jax.custom_vjp`, torch does too.

    Between kernels torch does what XLA would: constants, changes of shape and dtype,
    elementwise operations, sums. What an argument aliases (`input_output_aliases`) is
    updated in place, unless `fn` reads its old contents afterwards. A result that is an
    argument, possibly with another shape, shares its memory.

    Its method `custom_op` makes it an operation for `torch.compile`; `unload` releases
    what is compiled, as the end of its life does.

    Issued by: the host. It completes in the order of the stream.

    Args:
      fn: a function of arrays, jitted or not; results may be any pytree.
      inout_argnums: positions of arguments that `fn` takes as a `jax.Ref` and updates.

    Returns:
      A function of tensors, or pytrees of them: contiguous, 16-byte aligned, on one
      device.

    Raises:
      UnsupportedError: torch is missing, or, in a call, `fn` has an operation with no
        counterpart; the error has its name and line.
      ArgumentError, ArgumentTypeError: in a call, an argument is not such a tensor.
      NoGpuError, CompilationError, KernelError: in a call, as of the kernels.

    Example:
      >>> matmul = plgpu.as_torch_kernel(plgpu.ops.matmul)
      >>> c = matmul(a, b)  # torch.Tensor
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise errors.UnsupportedError(
            "as_torch_kernel: torch cannot be imported",
            expected="PyTorch 2.11 or newer",
            got=f"{type(error).__name__}: {error}",
            hint="pip install 'pallas-gpu[torch]'",
        ) from None
    from pallas_gpu.bridge.torch.kernel import TorchKernel

    return TorchKernel(fn, inout_argnums)
