# SPDX-License-Identifier: Apache-2.0
"""`python -m pallas_gpu`: exit statuses, and what is printed."""

from __future__ import annotations

import json
import textwrap

import pytest

from pallas_gpu.__main__ import main, shapes

KERNELS = """
import jax
import jax.numpy as jnp
import pallas_gpu as plgpu

SHAPE = jax.ShapeDtypeStruct((128,), jnp.float32)

def twice(x, o):
    o[...] = x[...] * 2

def outside(x, o):
    o[...] = x[...]
    o[x.shape[0] + jax.lax.axis_index("i")] = 0.0

def called(x, o):
    o[...] = jax.pure_callback(lambda x: x, SHAPE, x[...])

class Kernels:
    clean, wrong, unknown = (
        plgpu.kernel(body, out_type=SHAPE, grid=(1,), grid_names=("i",))
        for body in (twice, outside, called)
    )

def fails(x):
    raise RuntimeError("not a kernel")

def nothing(x):
    return x
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(textwrap.dedent(KERNELS))
    return path


@pytest.mark.parametrize(
    ("name", "status", "printed"),
    [
        ("Kernels.clean", 0, "clean\nkernel twice: 1 launch, 2 schedules"),
        ("Kernels.wrong", 1, "1 finding\n1. out-of-bounds: "),
        ("Kernels.unknown", 2, "1 operation not modelled\n1. unsupported: "),
        ("fails", 3, "RuntimeError: not a kernel"),
        ("nothing", 3, "does not call a kernel"),
    ],
)
def test_the_exit_status_says_what_the_verdict_is(file, name, status, printed, capsys):
    options = ["--shapes", "f32[128]", "--orders", "2"]
    assert main(["check", f"{file}:{name}", *options]) == status
    assert printed in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("options", "printed"),
    [(["--orders", "all", "--seconds", "5"], "all 1 orders"), (["--emitted"], "clean")],
)
def test_every_order_and_the_code_are_checked(file, options, printed, capsys):
    arguments = ["check", f"{file}:Kernels.clean", "--shapes", "f32[128]", *options]
    assert main(arguments) == 0
    assert printed in capsys.readouterr().out


def test_a_verdict_is_printed_as_json(file, capsys):
    main(["check", f"{file}:Kernels.wrong", "--shapes", "f32[128]", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert [f["rule"] for f in printed["findings"]] == ["out-of-bounds"]


@pytest.mark.offline
def test_compile_prints_the_resources(file, capsys):
    compiled = ["compile", f"{file}:Kernels.clean", "--shapes", "f32[128]"]
    assert main(compiled) == 0
    assert "registers per thread" in capsys.readouterr().out
    assert main([*compiled, "--json", "--target", "sm_100a"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["target"]) == ("twice", "sm_100a")


def test_shapes_name_dtypes_shortly_or_in_full():
    found = [(x.shape, x.dtype.name) for x in shapes("bf16[2, 3],int32[],u8[4]")]
    assert found == [((2, 3), "bfloat16"), ((), "int32"), ((4,), "uint8")]


@pytest.mark.parametrize(
    "wrong", ["f16[2", "f16[2]f16[2]", "quux[2]", "", "f16[2],"], ids=repr
)
def test_a_wrong_list_of_shapes_is_refused(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "module:f", "--shapes", wrong])
    assert ended.value.code == 3
    assert "--shapes" in capsys.readouterr().err
