"""Docstrings under the fields of a class, read from its source when a schema is asked for.

Pydantic's ``use_attribute_docstrings`` reads the source when the class is made, and every start would pay for that.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from pydantic import BaseModel


def attribute_docstrings(cls: type) -> dict[str, str]:
    """Field name → docstring for the fields that the body of ``cls`` declares; empty if the source is not available."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    body = ast.parse(source).body[0]
    if not isinstance(body, ast.ClassDef):
        return {}
    found: dict[str, str] = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            found[statement.target.id] = inspect.cleandoc(following.value.value)
    return found


def add_descriptions(cls: type[BaseModel], schema: dict[str, Any]) -> None:
    """Describe the properties of ``schema`` by the docstrings of ``cls`` and its bases; given descriptions stay."""
    docstrings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            docstrings.update(attribute_docstrings(base))
    for name, prop in schema.get("properties", {}).items():
        field = cls.model_fields.get(name)
        if name in docstrings and (field is None or field.description is None):
            prop["description"] = docstrings[name]
