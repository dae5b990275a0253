"""docs/contracts.md against the code: every field, hook, role and method is named, and nothing that does not exist."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import trivet.roles
from trivet import hookspecs
from trivet.roles import CARDINALITY, ROLE_CLASSES, ROLE_SIDES
from trivet.state import RequestTable

ROOT = Path(__file__).parents[2]
CONTRACTS = ROOT / "docs" / "contracts.md"
MODULES = [
    "trivet.plan",
    "trivet.result",
    "trivet.events",
    "trivet.provider",
    "trivet.context",
    "trivet.state",
    *(f"trivet.roles.{module.name}" for module in pkgutil.iter_modules(trivet.roles.__path__)),
]
#: vocabulary of the roles' table, not of a section
PLAIN = {"Cardinality", "Side"}
HOOKS = [
    *hookspecs.PROVIDER_HOOKS,
    *hookspecs.ENGINE_PHASES,
    *hookspecs.WORKER_PHASES,
    *hookspecs.OBSERVER_HOOKS,
]
HOOK_COLUMNS = ["hook", "fires", "default", "order", "mutability", "thread", "hot path"]
_CODE = re.compile(r"`([^`]+)`")


def classes() -> dict[str, type]:
    """Public classes of the contract by name."""
    found: dict[str, type] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        found |= {
            key: value
            for key, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == name and not key.startswith("_") and key not in PLAIN
        }
    planner, policies = importlib.import_module("trivet.planner"), importlib.import_module("trivet.policies")
    found |= {"Planner": planner.Planner, "Admission": planner.Admission}
    return found | {name: getattr(policies, name) for name in ("Policy", "SchedulingPolicy", "VictimPolicy")}


def members(cls: type) -> set[str]:
    """What ``cls`` itself adds: fields, and public methods as ``name(arguments)``."""
    if issubclass(cls, Enum):
        return set(cls.__members__)
    names = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    annotated = inspect.get_annotations(cls)
    names |= {name for name in annotated if not name.startswith("_")}
    for name, value in vars(cls).items():
        if name.startswith("_") or name in names:
            continue
        names.add(name if dataclasses.is_dataclass(cls) else member(name, value))
    return names - {"role"} if issubclass(cls, trivet.roles.Role) else names


def member(name: str, value: Any) -> str:
    """A method as ``name(arguments)``, anything else by its name."""
    function = inspect.unwrap(value) if inspect.isfunction(value) else None
    if function is None:
        return name
    return f"{name}({', '.join(p for p in inspect.signature(function).parameters if p != 'self')})"


@cache
def tables() -> list[tuple[str, list[str]]]:
    """``(heading, cells)`` of every table row, the header rows among them."""
    rows: list[tuple[str, list[str]]] = []
    heading = ""
    for line in CONTRACTS.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip("`")
        elif line.startswith("|") and not line.startswith("|---"):
            rows.append((heading, [cell.strip() for cell in line.strip().strip("|").split("|")]))
    return rows


@cache
def documented() -> dict[str, set[str]]:
    """Class → the members that the page names: rows of its own section, or its row in a table of records."""
    found: dict[str, set[str]] = {}
    records = False
    for heading, cells in tables():
        if cells[0] in {"record", "class", "member", "field", "role", "hook", "feature"}:
            records = cells[0] in {"record", "class"}
        elif records:
            name = cells[0].strip("`")
            assert name not in found, f"{name} is described twice"
            found[name] = set(_CODE.findall(cells[1]))
        elif heading in classes():
            names = _CODE.findall(cells[0])
            twice = found.setdefault(heading, set()) & set(names)
            assert not twice, f"{heading} names {twice} twice"
            found[heading].update(names)
    return found


@pytest.mark.parametrize("name", sorted(classes()))
def test_every_field_and_method_is_named_and_exists(name: str) -> None:
    wanted, named = members(classes()[name]), documented().get(name, set())
    assert not wanted - named, f"docs/contracts.md does not name {sorted(wanted - named)} of {name}"
    assert not named - wanted, f"docs/contracts.md names {sorted(named - wanted)} of {name}, which it does not have"


def test_every_class_of_the_page_exists() -> None:
    errors = {"TrivetError", "EngineUnhealthyError"}
    assert set(documented()) - errors == set(classes()) - {name for name, cls in classes().items() if not members(cls)}


def test_every_column_of_the_request_table_is_named() -> None:
    text = CONTRACTS.read_text(encoding="utf-8")
    section = text.partition("### `RequestTable`")[2].partition("\n## ")[0]
    table = RequestTable(2, 8)
    columns = {name for name in vars(table) if not name.startswith("_")} - {"max_num_seqs", "max_model_len"}
    assert not columns - set(_CODE.findall(section)), "RequestTable has columns that docs/contracts.md does not name"


def test_every_role_is_in_the_table_with_class_cardinality_and_side() -> None:
    rows = {cells[0].strip("`"): cells for heading, cells in tables() if heading == "Roles" and cells[0] != "role"}
    assert set(rows) == set(CARDINALITY)
    for role, (_, names, cardinality, side, *_) in rows.items():
        assert ROLE_CLASSES[role].__name__ in _CODE.findall(names)
        assert cardinality == CARDINALITY[role].value
        assert side.startswith(ROLE_SIDES[role].value)


def test_every_public_error_is_named() -> None:
    text = CONTRACTS.read_text(encoding="utf-8").partition("\n## Errors")[2]
    module = importlib.import_module("trivet.errors")
    errors = {n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__}
    assert not errors - set(_CODE.findall(text))


# ---------------------------------------------------------------- hooks


@cache
def hook_rows() -> dict[str, list[str]]:
    """Hook → its row."""
    return {cells[0].strip("`").partition("(")[0]: cells for _, cells in tables() if cells[0].startswith("`trivet_")}


def signature(function: Callable[..., Any]) -> str:
    """``name(argument: Annotation) -> Annotation``, as it is written."""
    text = str(inspect.signature(function)).replace("'", "")
    return f"{function.__name__}{text}"


def test_the_hooks_of_the_page_are_the_hooks_of_the_code() -> None:
    specs = {name for name in vars(hookspecs) if name.startswith("trivet_")}
    assert set(HOOKS) == specs
    assert set(hook_rows()) == specs
    headers = [cells for _, cells in tables() if cells[0] == "hook"]
    assert headers == [HOOK_COLUMNS] * 3


@pytest.mark.parametrize("hook", HOOKS)
def test_a_documented_hook_agrees_with_its_spec(hook: str) -> None:
    cells, spec = hook_rows()[hook], getattr(hookspecs, hook)
    assert cells[0].strip("`") == signature(spec)
    assert all(cells[1:]), "every column is filled"
    doc = " ".join((spec.__doc__ or "").split())
    thread, hot_path = cells[HOOK_COLUMNS.index("thread")], cells[HOOK_COLUMNS.index("hot path")]
    assert f"Hot path: {hot_path}." in doc
    words = {"the builder's": "the one that builds the engine", "engine": "engine.", "worker": "the worker's."}
    assert f"Thread: {words[thread]}" in doc


@pytest.mark.parametrize(
    "hook",
    HOOKS,
)
def test_every_hook_is_exercised_by_a_test(hook: str) -> None:
    word = re.compile(rf"\b{hook}\b")
    others = (path for path in (ROOT / "tests").rglob("*.py") if Path(__file__).parent not in path.parents)
    assert any(word.search(path.read_text(encoding="utf-8")) for path in others), f"no test names {hook}"


# ---------------------------------------------------------------- tests and links


@cache
def existing_tests() -> set[str]:
    """Names of test functions and of files under tests/."""
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        names.add(path.name)
        names.update(re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8")))
    return names


def test_every_test_that_the_page_names_exists() -> None:
    named = {name for name in _CODE.findall(CONTRACTS.read_text(encoding="utf-8")) if name.startswith("test_")}
    assert named
    assert not named - existing_tests()


def test_every_line_of_the_feature_table_says_what_carries_it_and_what_exercised_it() -> None:
    rows = [cells for heading, cells in tables() if heading == "What will carry what comes later"]
    assert rows[0] == ["feature", "carried by", "exercised by"]
    assert all(len(cells) == 3 and all(cells) for cells in rows)
    missing = CONTRACTS.read_text(encoding="utf-8").partition("\n## What is missing yet")[2].partition("\n## ")[0]
    numbers = set(re.findall(r"^- \((\d+)\) ", missing, re.MULTILINE))
    for _, carried, _ in rows[1:]:
        assert not set(re.findall(r"\((\d+)\)", carried)) - numbers, carried


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", list(pages()), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors that headings get."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
