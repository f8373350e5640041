# SPDX-License-Identifier: Apache-2.0
"""tools/setup_venv.py and the pins: what makes an environment stale, what fits what."""

from __future__ import annotations

import argparse
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tools import setup_venv
from tools.source_tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = sorted((ROOT / "tools").glob("constraints-0*.txt"))


def pins(path: Path) -> dict[str, str]:
    """The versions a constraints file and those it includes pin."""
    found = {}
    for file in setup_venv.constraint_files(path):
        for line in file.read_text().splitlines():
            name, equals, version = line.partition("==")
            if equals:
                found[name] = version
    return found


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_jax_and_its_cuda_plugin_are_pinned_to_one_version(path: Path):
    found = pins(path)
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
    assert len({found[name] for name in names}) == 1


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_the_cuda_wheels_are_of_one_release_save_the_disassembler(path: Path):
    found = {k: v for k, v in pins(path).items() if k.startswith("nvidia-")}
    found.pop("nvidia-cuda-nvdisasm")
    assert set(found.values()) == {"13.0.88"}


def test_the_constraints_stand_at_both_ends_of_the_supported_range():
    assert "jax>=0.11.2,<0.13" in PROJECT["dependencies"]
    versions = [pins(path)["jax"] for path in CONSTRAINTS]
    assert versions[0] == "0.11.2"
    assert versions[-1].startswith("0.12.")


def test_the_tools_of_the_project_are_pinned_exactly():
    extra = PROJECT["optional-dependencies"]["dev"]
    assert [pin for pin in extra if not re.fullmatch(r"[\w-]+==[\d.]+", pin)] == []


def test_the_offline_extra_is_empty_where_no_cuda_wheels_exist():
    for requirement in PROJECT["optional-dependencies"]["offline"]:
        assert "; sys_platform == 'linux' and (platform_machine ==" in requirement


def test_the_hash_of_a_set_up_follows_its_inputs(tmp_path: Path):
    included = tmp_path / "cuda.txt"
    included.write_text("a==1\n")
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("-c cuda.txt\nb==1\n")
    before = setup_venv.setup_key(constraints, ["dev"], False)
    assert setup_venv.setup_key(constraints, ["dev"], False) == before
    assert setup_venv.setup_key(constraints, ["dev", "offline"], False) != before
    assert setup_venv.setup_key(constraints, ["dev"], True) != before
    included.write_text("a==2\n")
    assert setup_venv.setup_key(constraints, ["dev"], False) != before


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch):
    """Records what would be installed; `fails` names the extra that pip cannot get."""
    calls: list[list[str]] = []
    state = argparse.Namespace(calls=calls, fails=None)

    def install(venv: Path, constraints: Path, extras: list[str]):
        calls.append(extras)
        failed = int(state.fails in extras)
        return subprocess.CompletedProcess([], failed, "pip's own words", "")

    monkeypatch.setattr(setup_venv, "pip_install", install)
    monkeypatch.setattr(setup_venv, "has_gpu", lambda: False)
    monkeypatch.setattr(
        setup_venv, "python_runs", lambda python: python.parent.exists()
    )
    monkeypatch.setattr(
        setup_venv,
        "make_environment",
        lambda venv, system_site: (venv / "bin").mkdir(parents=True),
    )
    monkeypatch.setattr(setup_venv.platform, "system", lambda: "Linux")
    monkeypatch.setattr(setup_venv.platform, "machine", lambda: "x86_64")
    return state


def arguments(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        venv=tmp_path / "venv",
        constraints=CONSTRAINTS[0],
        extras="dev,offline",
        system_site=False,
        python_was_named=False,
    )


def test_a_second_run_installs_nothing_and_says_nothing(
    tmp_path: Path, fake_pip: argparse.Namespace, capsys: pytest.CaptureFixture[str]
):
    setup_venv.set_up(arguments(tmp_path))
    assert fake_pip.calls == [["dev", "offline"]]
    capsys.readouterr()
    setup_venv.set_up(arguments(tmp_path))
    assert fake_pip.calls == [["dev", "offline"]]
    assert capsys.readouterr().out == ""


def test_without_the_cuda_wheels_it_goes_on_and_says_so_each_time(
    tmp_path: Path, fake_pip: argparse.Namespace, capsys: pytest.CaptureFixture[str]
):
    fake_pip.fails = "offline"
    setup_venv.set_up(arguments(tmp_path))
    assert fake_pip.calls == [["dev", "offline"], ["dev"]]
    said = "offline compilation is omitted: the compilers' wheels could not be "
    said += "installed"
    assert said in capsys.readouterr().out
    setup_venv.set_up(arguments(tmp_path))
    assert said in capsys.readouterr().out


def test_on_a_system_without_cuda_wheels_offline_is_left_out(
    tmp_path: Path,
    fake_pip: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(setup_venv.platform, "system", lambda: "Darwin")
    setup_venv.set_up(arguments(tmp_path))
    assert "omitted: no CUDA wheels for Darwin" in capsys.readouterr().out


def test_on_a_gpu_machine_the_cuda_libraries_are_installed_too(
    tmp_path: Path, fake_pip: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(setup_venv, "has_gpu", lambda: True)
    setup_venv.set_up(arguments(tmp_path))
    assert fake_pip.calls == [["dev", "offline", "cuda13"]]


def test_a_failed_install_leaves_no_stamp_and_names_the_way_without_a_network(
    tmp_path: Path, fake_pip: argparse.Namespace
):
    fake_pip.fails = "dev"
    with pytest.raises(setup_venv.SetupError, match="make SYSTEM_SITE=1 PYTHON="):
        setup_venv.set_up(arguments(tmp_path))
    assert setup_venv.read_stamp(tmp_path / "venv") == {}


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.txt").write_text("years of work")
    with pytest.raises(setup_venv.SetupError, match="is not a virtual environment"):
        setup_venv.make_environment(tmp_path / "venv", system_site=False)
    assert (tmp_path / "venv" / "thesis.txt").exists()
