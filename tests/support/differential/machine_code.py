# SPDX-License-Identifier: Apache-2.0
"""How many machine instructions ptxas makes of PTX, counted in the cubin itself."""

from __future__ import annotations

import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pallas_gpu.runtime import environment

# Every instruction since Volta takes 128 bits, with the opcode in the low twelve.
_BYTES = 16
_OPCODE = 0xFFF
_NOP = 0x918
# Fields of the headers of an ELF64 file and of its sections.
_SECTIONS_AT = struct.Struct("<40xQ12xHH")
_SECTION = struct.Struct("<I20xQQ24x")


def instructions(ptx: str, target: str) -> int:
    """Assembles PTX as the plugin does and counts, without the NOPs.

    nvdisasm shows the same instructions, in twenty times the time.
    """
    ptxas = environment.find_cuda().ptxas
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        subprocess.run(
            [str(ptxas), f"-arch={target}", "-o", str(cubin), str(source)],
            check=True,
            capture_output=True,
        )
        elf = cubin.read_bytes()
    return sum(
        struct.unpack_from("<H", code, at)[0] & _OPCODE != _NOP
        for name, code in _sections(elf)
        if name.startswith(b".text.")
        for at in range(0, len(code), _BYTES)
    )


def _sections(elf: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the name and the contents of each section of an ELF file."""
    start, count, names_index = _SECTIONS_AT.unpack_from(elf)
    headers = [
        _SECTION.unpack_from(elf, start + _SECTION.size * i) for i in range(count)
    ]
    _, names_start, _ = headers[names_index]
    for name, offset, size in headers:
        begin = names_start + name
        yield elf[begin : elf.index(b"\0", begin)], elf[offset : offset + size]
