# SPDX-License-Identifier: Apache-2.0
"""Machine code of kernels, compiled and launched by JAX's CUDA plugin without JAX.

The plugin has two C functions: `MosaicGpuCompile(bytes, size)` compiles a serialized
module for the current device and returns two pointers, a handle of the kernel and a
host function `launch(handle, stream, buffers)`; `MosaicGpuUnload` takes what the first
returned.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from typing import Any, NamedTuple

import torch

from pallas_gpu import arch, compiler, errors
from pallas_gpu.entry import call
from pallas_gpu.runtime import custom_call, environment, register
from pallas_gpu.runtime.serialize import SerializedModule

_PLUGIN = "xla_cuda_plugin.so"
_LAUNCH = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class Library(NamedTuple):
    """The plugin's two functions."""

    compile: Any
    unload: Any


@functools.cache
def library() -> Library:
    """Loads the plugin; where JAX has, it is the same one."""
    custom_call.prepare_once()
    folder = environment.find_cuda().pjrt
    if folder is None or not (folder / _PLUGIN).exists():
        raise errors.OfflineUnavailableError(
            "as_torch_kernel: JAX's CUDA plugin, which compiles kernels, is missing",
            expected=f"{_PLUGIN} of jax-cuda13-pjrt",
            got=f"nothing in {folder}",
            hint="pip install 'pallas-gpu[cuda13,torch]'",
        )
    plugin = ctypes.CDLL(str(folder / _PLUGIN))
    compiled = ctypes.POINTER(ctypes.c_void_p)
    compile_, unload = plugin.MosaicGpuCompile, plugin.MosaicGpuUnload
    compile_.argtypes, compile_.restype = [ctypes.c_char_p, ctypes.c_int], compiled
    unload.argtypes, unload.restype = [compiled], None
    return Library(compile_, unload)


class Code:
    """A kernel's machine code in the context of one GPU, unloaded with this object.

    Attributes:
      unload: releases it before that; a second call does nothing.
    """

    def __init__(self, serialized: SerializedModule, name: str, device: int):
        functions = library()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the context is current
            compiled = functions.compile(serialized.bytecode, len(serialized.bytecode))
        if not compiled:
            raise errors.CompilationError(
                f"kernel {name} does not compile",
                expected="machine code from JAX's CUDA plugin",
                got="nothing; its standard error has the reason",
                hint="pallas_gpu.offline.compile shows it; please report it with the "
                "kernel",
            )
        self._handle = compiled[0]
        self._launch = _LAUNCH(compiled[1])
        self.unload = weakref.finalize(self, _unload, functions, compiled, device)
        # A process that ends takes its kernels along, and CUDA may be gone before.
        self.unload.atexit = False

    def __call__(self, stream: int, buffers: Any) -> None:
        """Launches it on a stream with a table of addresses."""
        self._launch(self._handle, stream, buffers)


def _unload(functions: Library, compiled: Any, device: int) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # it may be running
        functions.unload(compiled)


_LOADED: weakref.WeakValueDictionary[Any, Code] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def code_for(params: call.CallParams, target: arch.GpuTarget, device: int) -> Code:
    """Returns a kernel's code on a GPU; kernels of equal bytes share it.

    Raises:
      PallasGpuError: it does not compile.
    """
    wanted = compiler.target_of(params, lambda: target)
    compiler.require_runs_on(wanted, target, params.name)
    serialized = register.lower_ahead(params, target).serialized
    key = serialized.hash, device
    with _LOCK:
        loaded = _LOADED.get(key)
        if loaded is None or not loaded.unload.alive:
            loaded = _LOADED[key] = Code(serialized, params.name, device)
    return loaded
