"""``trivet plugins new``: the packages that it writes pass their own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trivet.errors import TrivetError
from trivet.launcher import main
from trivet.launcher.scaffold import package_name, roles, write_package

#: run in the default suite; the others in the full one
QUICK = ("cache", "extension", "logits_processor", "scheduler")


def run_tests(folder: Path, *arguments: str) -> None:
    """Run the tests of a package that is on the path with its metadata, as if it were installed."""
    package = package_name(folder.name)
    info = folder / "src" / f"{package}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[trivet]\n{package} = {package}.plugin\n")
    path = os.pathsep.join([str(folder / "src"), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:asyncio", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments],
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    "role", [role if role in QUICK else pytest.param(role, marks=pytest.mark.full) for role in roles()]
)
def test_a_new_package_passes_its_tests(tmp_path: Path, role: str) -> None:
    run_tests(write_package(f"my-{role.replace('_', '-')}", role, tmp_path))


@pytest.mark.parametrize("role", roles())
def test_every_file_is_complete(tmp_path: Path, role: str) -> None:
    folder = write_package("acme.Thing", role, tmp_path)
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    expected = {"pyproject.toml", "tox.ini", "README.md", ".gitignore", "tests/test_package.py"}
    assert expected | {f"src/acme_thing/{role}.py", f"tests/test_{role}.py"} <= names
    for name in names:
        text = (folder / name).read_text()
        assert "{{" not in text
        assert "{%" not in text
        if name.endswith(".py"):
            compile(text, name, "exec")
    assert "acme_thing" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "no name for a distribution"),
        ("-x", "no name for a distribution"),
        ("a b", "no name for a distribution"),
        ("../x", "no name for a distribution"),
        ("9lives", "Python does not allow"),
        ("class", "Python does not allow"),
        ("json", "hides another module"),
        ("trivet", "hides another module"),
        ("trivet-fast", "Trivet's own"),
        ("paged", "installed already"),
    ],
)
def test_names_that_are_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(TrivetError, match=words):
        write_package(name, "cache", tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(TrivetError, match="exists already"):
        write_package("mine", "cache", tmp_path)
    assert not list((tmp_path / "mine").iterdir())
    with pytest.raises(TrivetError, match="not a folder"):
        write_package("mine", "cache", tmp_path / "nowhere")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "new", "my-sched", "--role", "scheduler", "--path", str(tmp_path)]) == 0
    assert "tox" in capsys.readouterr().out
    assert (tmp_path / "my-sched" / "src" / "my_sched" / "scheduler.py").is_file()
    assert main(["plugins", "new", "my-sched", "--role", "scheduler", "--path", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["plugins", "new", "other", "--role", "schedular", "--path", str(tmp_path)]) == 2
    assert "did you mean 'scheduler'" in capsys.readouterr().err


@pytest.mark.full
def test_its_own_tox_passes(tmp_path: Path, repository: Path) -> None:
    """Trivet is taken from a wheel of this checkout, everything else from where pip finds it."""
    wheels = tmp_path / "wheels"
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, str(wheels), str(repository)], check=True)
    folder = write_package("my-scheduler", "scheduler", tmp_path)
    env = os.environ | {"PIP_FIND_LINKS": str(wheels), "PIP_CONSTRAINT": str(repository / "constraints.txt")}
    env.pop("PYTHONPATH", None)
    command = [sys.executable, "-m", "tox", "-q", "--workdir", str(tmp_path / "work")]
    done = subprocess.run(command, check=False, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "py: OK" in done.stdout
