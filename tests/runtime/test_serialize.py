# SPDX-License-Identifier: Apache-2.0
"""Serialized modules: stable bytes, an untouched original, clear refusals."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.runtime import serialize

ROOT = Path(__file__).parents[2]


def test_hash_is_the_sha256_of_the_bytes(serialize_body):
    serialized = serialize_body()
    assert serialized.hash == hashlib.sha256(serialized.bytecode).digest()


def test_module_itself_stays_as_it_was(parse_module):
    module = parse_module()
    before, allows = str(module), module.context.allow_unregistered_dialects
    serialize.serialize(module)
    assert str(module) == before
    assert module.context.allow_unregistered_dialects == allows


def test_a_module_being_built_elsewhere_takes_no_copy(parse_module):
    module = parse_module()
    with module.context, ir.Location.unknown():
        other = ir.Module.create()
        with ir.InsertionPoint(other.body):
            assert serialize.serialize(module) == serialize.serialize(parse_module())
    assert len(other.body.operations) == 0


def test_equal_modules_from_different_lines_give_equal_bytes(parse_module):
    module = parse_module()
    text = module.operation.get_asm(enable_debug_info=False)
    with module.context:
        moved = ir.Module.parse("\n\n// another line\n" + text)
    assert serialize.serialize(module) == serialize.serialize(moved)


def test_kept_locations_are_in_the_bytes(parse_module):
    module = parse_module()
    with module.context, ir.Location.file("kernel_source.py", 7, 1, module.context):
        block = module.body.operations[1].regions[0].blocks[0]
        with ir.InsertionPoint.at_block_begin(block):
            i32 = ir.IntegerType.get_signless(32)
            value = ir.IntegerAttr.get(i32, 5)
            ir.Operation.create("arith.constant", [i32], attributes={"value": value})
    kept = serialize.serialize(module, keep_locations=True)
    assert b"kernel_source.py" in kept.bytecode
    assert b"kernel_source.py" not in serialize.serialize(module).bytecode


def test_other_body_gives_other_hash(serialize_body):
    assert serialize_body().hash != serialize_body("math.absf %w : f32").hash


def test_another_process_gives_equal_bytes(serialize_body):
    script = f"""
        import importlib.util
        spec = importlib.util.spec_from_file_location(
            "module", {str(Path(__file__).with_name("conftest.py"))!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        from jax.interpreters import mlir
        from jaxlib.mlir import ir
        from pallas_gpu.runtime import serialize
        context = mlir.make_ir_context()
        serialize.register_dialect(context)
        text = module.MODULE.replace("NAME", "exp_plus_one")
        with context:
            parsed = ir.Module.parse(text.replace("BODY", module.EXP))
        print(serialize.serialize(parsed).hash.hex())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == serialize_body().hash.hex()


def test_a_broken_module_is_refused_with_mlirs_words(parse_module):
    module = parse_module()
    *_, terminator = module.body.operations[1].regions[0].blocks[0].operations
    terminator.erase()
    with pytest.raises(errors.CompilationError, match="cannot be serialized") as info:
        serialize.serialize(module)
    assert "block with no terminator" in str(info.value)


def test_long_errors_are_shortened_and_say_so():
    text = serialize.shortened("\n".join(["x" * 1000] * 50))
    assert text.endswith("… and 10 more lines")
    assert max(map(len, text.splitlines())) == 400
