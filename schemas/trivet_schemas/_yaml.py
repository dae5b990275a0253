"""Read one YAML document with the line of every value; PyYAML alone forgets lines and keeps the last of equal keys.

Keys are always text, as written: ``on`` stays ``on`` and ``50256`` is ``"50256"``. Numbers like ``1e-3`` are floats,
as in YAML 1.2 (PyYAML's YAML 1.1 reads them as text).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from trivet_schemas.errors import Problem, join_path

_MAX_NODES = 200_000
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")


class _Loader(yaml.SafeLoader):
    """The safe loader with YAML 1.2's floats."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass(slots=True)
class Document:
    """The value of a document (None if it is empty), dotted path → line from 1, and what is wrong with it."""

    value: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_yaml(text: str) -> Document:
    """Parse ``text``. Problems are syntax errors, equal keys, keys that are no text, unknown tags, endless aliases."""
    document = Document()
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _find_duplicates(node, "", document, set())
            if not document.problems:
                document.value = _Builder(loader, document.lines).build(node, "")
    except yaml.MarkedYAMLError as exc:
        document.problems.append(_syntax_problem(exc, text))
    except yaml.reader.ReaderError as exc:
        line = text.count("\n", 0, exc.position) + 1
        document.problems.append(Problem("", f"not valid YAML: {exc.reason}: character {exc.character!r}", line))
    finally:
        if loader is not None:
            loader.dispose()
    return document


def _syntax_problem(exc: yaml.MarkedYAMLError, text: str) -> Problem:
    """What PyYAML found, with the line and a mark under the column."""
    mark = exc.problem_mark or exc.context_mark
    what = ": ".join(text for text in (exc.context, exc.problem) if text)
    if "\\t" in what:
        what += "; indent with spaces"
    if mark is None:
        return Problem("", f"not valid YAML: {what}")
    lines = text.splitlines()
    shown = lines[mark.line] if mark.line < len(lines) else ""
    pointer = f"\n    {shown}\n    {' ' * mark.column}^" if shown else ""
    return Problem("", f"not valid YAML at line {mark.line + 1}, column {mark.column + 1}: {what}{pointer}")


def _find_duplicates(node: yaml.Node, path: str, document: Document, seen: set[int]) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _find_duplicates(item, join_path(path, index), document, seen)
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                document.problems.append(Problem(path, "keys must be plain text, not a list or a mapping", line))
                continue
            name = str(key.value)
            inner = join_path(path, name)
            if name in first and key.tag != "tag:yaml.org,2002:merge":
                document.problems.append(Problem(inner, f"is given twice, first in line {first[name]}; keep one", line))
            first.setdefault(name, line)
            _find_duplicates(value, inner, document, seen)


def _join_surrogates(value: Any, node: yaml.Node) -> Any:
    r"""Text without surrogates: JSON writes one emoji as two escapes (``\ud83d\ude00``), which PyYAML does not join."""
    if not isinstance(value, str) or not any("\ud800" <= letter <= "\udfff" for letter in value):
        return value
    try:
        return value.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        reason = "text holds half of a surrogate pair"
        raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark) from None


class _Builder:
    """Makes Python values from nodes. An aliased node is built anew each time, so that no two places share a value."""

    def __init__(self, loader: _Loader, lines: dict[str, int]) -> None:
        self._loader = loader
        self._lines = lines
        self._count = 0
        self._open: set[int] = set()

    def build(self, node: yaml.Node, path: str) -> Any:
        self._count += 1
        if self._count > _MAX_NODES or id(node) in self._open:
            reason = "an alias contains itself" if id(node) in self._open else "aliases expand to too many values"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            return _join_surrogates(self._loader.construct_object(node, deep=True), node)
        if node.tag not in {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}:  # `!!set {...}` and the like
            raise yaml.constructor.ConstructorError(None, None, f"unknown tag {node.tag!r}", node.start_mark)
        self._open.add(id(node))
        if not isinstance(node, yaml.MappingNode):
            value: Any = [self._item(item, item, join_path(path, index)) for index, item in enumerate(node.value)]
        else:
            self._loader.flatten_mapping(node)
            value = {key.value: self._item(key, item, join_path(path, key.value)) for key, item in node.value}
        self._open.discard(id(node))
        return value

    def _item(self, mark: yaml.Node, node: yaml.Node, path: str) -> Any:
        self._lines[path] = mark.start_mark.line + 1
        return self.build(node, path)
