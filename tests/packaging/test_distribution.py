"""What is built and installed: one wheel, whole, with light imports and declared plugins."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import trivet

_SOURCE_ROOTS = ("core", "schemas", "kernels", "plugins")
_HEAVY = ("torch", "transformers", "safetensors", "triton")
# Paths of one machine, and ways to other package indexes: no business of the project.
_LOCAL = re.compile(
    r"(?<![\w.])/(?:root|home|Users|opt|mnt|work)/\w"
    r"|--(?:extra-)?index-url|--find-links|file://|(?<!\w)[A-Z]:\\(?:Users|Documents)"
)


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with the backend that pip would call, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=repository, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


def _packages(repository: Path) -> dict[str, Path]:
    return {
        path.parent.name: path.parent
        for root in _SOURCE_ROOTS
        for path in (repository / root).glob("trivet*/__init__.py")
    }


def _run(code: str, folder: Path) -> str:
    """Run ``code`` in a fresh interpreter in ``folder``; in the checkout itself, its folders would be importable."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_wheel_holds_every_file_of_every_package(repository: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    expected = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in _packages(repository).items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected - packed == set()
    # Nothing but the packages and the metadata: no tests, no source roots.
    assert {name.split("/")[0] for name in packed} == {
        *_packages(repository),
        wheel.name[:-4].split("-py3")[0] + ".dist-info",
    }


def test_the_wheel_declares_the_command_and_every_bundled_plugin(wheel: Path, project: dict[str, Any]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        text = archive.read(metadata).decode()
    assert "trivet = trivet.launcher:main" in text
    for name, target in project["project"]["entry-points"]["trivet"].items():
        assert f"{name} = {target}" in text
        assert target.replace(".", "/") + ".py" in names


def test_every_plugin_package_has_an_entry_point(repository: Path, project: dict[str, Any]) -> None:
    declared = {target.split(".")[0] for target in project["project"]["entry-points"]["trivet"].values()}
    plugins = {path.parent.name for path in (repository / "plugins").glob("trivet_*/plugin.py")}
    assert plugins | {"trivet_torch"} == declared


def test_every_package_is_typed_and_under_the_import_contracts(repository: Path, project: dict[str, Any]) -> None:
    packages = _packages(repository)
    assert [name for name, folder in packages.items() if not (folder / "py.typed").is_file()] == []
    assert set(project["tool"]["importlinter"]["root_packages"]) == set(packages)


@pytest.mark.parametrize("root", _SOURCE_ROOTS)
def test_source_roots_are_not_importable(root: str, repository: Path, tmp_path: Path) -> None:
    # transformers, for one, takes any importable module called `kernels` for a package of that name.
    assert (repository / root).is_dir()
    assert not (repository / root / "__init__.py").exists()
    assert _run(f"import importlib.util; print(importlib.util.find_spec({root!r}))", tmp_path) == "None"


def test_importing_the_core_loads_no_deep_learning_library(tmp_path: Path) -> None:
    code = f"import sys, trivet, trivet_schemas; print(sorted(set({_HEAVY!r}) & set(sys.modules)))"
    assert _run(code, tmp_path) == "[]"


def test_loading_every_bundled_entry_point_loads_no_deep_learning_library(
    project: dict[str, Any], tmp_path: Path
) -> None:
    code = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "names = [e.name for e in entry_points(group='trivet') if e.dist.name == 'trivet' and e.load()]\n"
        f"print(sorted(names), sorted(set({_HEAVY!r}) & set(sys.modules)))\n"
    )
    assert _run(code, tmp_path) == f"{sorted(project['project']['entry-points']['trivet'])} []"


def test_the_versions_agree() -> None:
    assert trivet.__version__ == version("trivet")


def test_the_changelog_knows_the_version(repository: Path) -> None:
    changelog = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(trivet.__version__)}\]", changelog, re.MULTILINE)


def test_the_constraints_satisfy_every_declared_range(repository: Path, project: dict[str, Any]) -> None:
    pins = {}
    for line in (repository / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, pin = line.partition("==")
            pins[name] = pin
    extras = project["project"]["optional-dependencies"]
    used = [text for extra in ("demo", "testing", "test", "dev") for text in extras[extra]]
    declared = [Requirement(text) for text in (*project["project"]["dependencies"], *used)]
    for requirement in declared:
        if requirement.name == "trivet":
            continue
        assert requirement.name in pins
        assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_the_light_dependencies_are_the_core_dependencies_without_the_heavy_ones(project: dict[str, Any]) -> None:
    heavy = {"huggingface-hub", "safetensors", "tokenizers", "torch", "transformers"}
    light = [text for text in project["project"]["dependencies"] if Requirement(text).name not in heavy]
    assert project["dependency-groups"]["light"] == light


def test_every_extra_but_the_developers_is_in_all(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    (everything,) = (Requirement(text) for text in extras["all"])
    assert everything.extras == set(extras) - {"all", "dev", "test", "testing"}


def test_the_entry_points_of_this_checkout_are_the_ones_installed(project: dict[str, Any]) -> None:
    installed = {
        point.name: point.value for point in entry_points(group="trivet") if point.dist and point.dist.name == "trivet"
    }
    assert installed == project["project"]["entry-points"]["trivet"]


def test_no_file_names_a_local_path_or_another_package_index(repository: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=repository, check=True, capture_output=True, text=True)
    found = []
    for name in tracked.stdout.split("\0"):
        path = repository / name
        if not path.is_file() or path == Path(__file__).resolve():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a binary fixture
            continue
        found += [f"{name}: {match.group(0)}" for match in _LOCAL.finditer(text)]
    assert found == []
