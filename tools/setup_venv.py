# SPDX-License-Identifier: Apache-2.0
"""Creates the project's virtual environment and installs the package into it.

`make setup` runs this with any Python >= 3.12; it uses only the standard library. A
stamp in the environment has a hash of everything that determines what is installed, so
a second run without changes only compares the two.

There are two modes:

* pip, with its own configuration and pinned versions (the default);
* `--system-site`: nothing is downloaded. The environment uses the packages of the
  Python that created it, and this package from its source. For a machine without a
  network that already has jax.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP = "pallas-gpu-setup.json"
LOG = "pallas-gpu-setup.log"
CUDA_WHEELS = {("Linux", "x86_64"), ("Linux", "aarch64")}


class SetupError(Exception):
    """The environment cannot be created; the message has the reason and a remedy."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def base_interpreter() -> str:
    """The base interpreter of the running Python's virtual environment, if any."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def constraint_files(path: Path) -> list[Path]:
    """A constraints file and those that it includes by a line `-c other.txt`."""
    files = [path]
    for line in path.read_text().splitlines():
        if line.startswith("-c "):
            files += constraint_files(path.parent / line[3:].strip())
    return files


def setup_key(constraints: Path, extras: list[str], system_site: bool) -> str:
    """A hash of everything that determines what is installed."""
    digest = hashlib.sha256()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # The tools' settings in that file do not affect what is installed.
    built_from = [settings["build-system"], settings["project"]]
    digest.update(json.dumps(built_from).encode())
    for path in (Path(__file__), *constraint_files(constraints)):
        digest.update(path.read_bytes())
    maker = sys.prefix if system_site else ""
    digest.update(json.dumps([str(ROOT), extras, maker]).encode())
    return digest.hexdigest()


def read_stamp(venv: Path) -> dict[str, str]:
    try:
        return json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}


def python_runs(python: Path) -> bool:
    """Whether an environment's interpreter runs and is recent enough."""
    if not python.exists():
        return False
    check = "import sys; sys.exit(sys.version_info < (3, 12))"
    result = subprocess.run([python, "-c", check], capture_output=True, check=False)
    return result.returncode == 0


def make_environment(venv: Path, system_site: bool) -> None:
    """Creates the environment, replacing an unusable one."""
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        raise SetupError(
            f"{venv} exists and is not a virtual environment: move it away, or choose "
            "another place with VENV=..."
        )
    arguments = ["--clear"]
    if system_site:
        # Nothing is installed, so neither pip nor ensurepip is needed.
        arguments += ["--system-site-packages", "--without-pip"]
    command = [sys.executable, "-m", "venv", *arguments, str(venv)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return
    uv = shutil.which("uv")
    if uv and not system_site:
        shutil.rmtree(venv, ignore_errors=True)
        command = [uv, "venv", "--seed", "--python", sys.executable, str(venv)]
        fallback = subprocess.run(command, capture_output=True, text=True, check=False)
        if fallback.returncode == 0:
            return
        result = fallback
    raise SetupError(
        f"{sys.executable} could not create a virtual environment, nor could uv "
        "(on some systems venv is a separate package, e.g. python3-venv):\n"
        + (result.stderr or result.stdout)[-600:]
    )


def has_gpu() -> bool:
    """Whether NVIDIA's driver lists a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    result = subprocess.run(
        [program, "-L"], capture_output=True, text=True, check=False
    )
    return result.returncode == 0 and "GPU 0" in result.stdout


def pip_install(
    venv: Path, constraints: Path, extras: list[str]
) -> subprocess.CompletedProcess[str]:
    """Installs the package from its source with extras; appends to the log."""
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    command = [str(venv / "bin" / "python"), "-m", "pip", "install"]
    command += ["-c", str(constraints), "-e", target]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    with (venv / LOG).open("a") as log:
        log.write(f"$ {' '.join(command)}\n{result.stdout}\n")
    return result


def install_from_index(venv: Path, constraints: Path, extras: list[str]) -> str:
    """Installs with pip; returns why offline compilation is omitted, or nothing."""
    say(
        f"installing {constraints.stem.replace('constraints-', 'jax ')} with "
        f"{', '.join(extras)} into {venv.name} (one or two minutes)"
    )
    reason = ""
    if (platform.system(), platform.machine()) not in CUDA_WHEELS:
        reason = f"no CUDA wheels for {platform.system()} on {platform.machine()}"
    result = pip_install(venv, constraints, extras)
    if result.returncode != 0:
        # Compilers' wheels are large and not available everywhere: continue without.
        compilers = ("offline", "cuda13", "tpu")
        required = [extra for extra in extras if extra not in compilers]
        if required != extras:
            reason = "the compilers' wheels could not be installed"
            result = pip_install(venv, constraints, required)
    if result.returncode != 0:
        raise SetupError(
            f"pip failed (full output in {venv / LOG}):\n{result.stdout[-1500:]}\n"
            "Without a network, a Python that already has jax can be used: "
            "make SYSTEM_SITE=1 PYTHON=/path/to/that/python"
        )
    return reason


def link_source(venv: Path) -> str:
    """Adds this source and its creator's packages to the environment; no downloads.

    `--system-site-packages` adds the packages of the base interpreter. If the creator
    is itself in a virtual environment, its packages require an additional line.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site_packages = venv / "lib" / version / "site-packages"
    lines = [str(ROOT)]
    if sys.prefix != sys.base_prefix:
        parent = Path(sys.prefix) / "lib" / version / "site-packages"
        lines.append(f"import site; site.addsitedir({str(parent)!r})")
    (site_packages / "pallas_gpu_source.pth").write_text("\n".join(lines) + "\n")

    check = (
        "import importlib.util as util, jax\n"
        "wanted = 'pytest', 'xdist', 'hypothesis'\n"
        "missing = [name for name in wanted if not util.find_spec(name)]\n"
        "print(jax.__version__, *missing)"
    )
    command = [str(venv / "bin" / "python"), "-c", check]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SetupError(
            f"{sys.executable} cannot import jax: select a Python that can with "
            f"PYTHON=..., or omit SYSTEM_SITE to install jax.\n"
            f"{result.stderr[-600:]}"
        )
    jax_version, *missing = result.stdout.split()
    say(f"using the packages of {sys.executable}, jax {jax_version}; installed nothing")
    if missing:
        say(f"it has no {', '.join(missing)}: the demo runs, the tests may not")
    return ""


def set_up(args: argparse.Namespace) -> None:
    """Updates the environment, and reports what it did."""
    venv, constraints = args.venv.absolute(), args.constraints.absolute()
    extras = [name for name in args.extras.split(",") if name]
    if not args.system_site and has_gpu() and "cuda13" not in extras:
        # With libtpu installed, JAX looks for a TPU before it looks for a GPU.
        extras = [*(name for name in extras if name != "tpu"), "cuda13"]
    key = setup_key(constraints, extras, args.system_site)
    stamp = read_stamp(venv)
    works = python_runs(venv / "bin" / "python")
    other_python = args.python_was_named and stamp.get("base") not in (
        None,
        base_interpreter(),
    )
    if not (works and stamp.get("key") == key and not other_python):
        started = time.monotonic()
        if not works or other_python:
            say(f"creating {venv.name} with {sys.executable}")
            make_environment(venv, args.system_site)
        (venv / STAMP).unlink(missing_ok=True)
        if args.system_site:
            reason = link_source(venv)
        else:
            reason = install_from_index(venv, constraints, extras)
        stamp = {
            "key": key,
            "base": base_interpreter(),
            "offline_left_out": reason,
        }
        (venv / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
        say(f"done in {time.monotonic() - started:.0f} s")
    if stamp.get("offline_left_out"):
        say(f"offline compilation is omitted: {stamp['offline_left_out']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--constraints", type=Path, required=True)
    parser.add_argument("--extras", default="dev,offline")
    parser.add_argument("--system-site", action="store_true")
    parser.add_argument("--python-was-named", action="store_true")
    args = parser.parse_args()
    if not args.constraints.exists():
        known = sorted(
            path.stem for path in args.constraints.parent.glob("constr*.txt")
        )
        print(
            f"setup: no file {args.constraints}; there are {', '.join(known)}",
            file=sys.stderr,
        )
        return 2
    try:
        set_up(args)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
