from __future__ import annotations

import subprocess
import sys

import pytest

import trivet_schemas


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_the_package_itself_loads_nothing_slow() -> None:
    assert not modules_after("import trivet_schemas") & {"pydantic", "yaml", "dataclasses", "inspect"}


def test_errors_and_outputs_need_no_pydantic() -> None:
    assert not modules_after("import trivet_schemas.errors, trivet_schemas.outputs") & {"pydantic", "yaml"}


def test_nothing_loads_numpy_torch_or_the_core() -> None:
    statement = f"from trivet_schemas import {', '.join(trivet_schemas.__all__)}"
    assert not modules_after(statement) & {"numpy", "torch", "transformers", "trivet", "jsonschema"}


@pytest.mark.parametrize("name", trivet_schemas.__all__)
def test_every_exported_name_exists(name: str) -> None:
    assert getattr(trivet_schemas, name) is not None
    assert name in dir(trivet_schemas)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'SamplingParam'"):
        trivet_schemas.SamplingParam  # noqa: B018  the access is what is tested
