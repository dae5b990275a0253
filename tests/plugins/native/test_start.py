"""What starting the native model takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from native_kit import make_model, save

from trivet_native.layers import Scratch

PROGRAM = """
import sys
from trivet.engine import Engine
from trivet.testing.fakes import FakeTokenizer

settings = {"model": sys.argv[1], "dtype": "float32", "device": "cpu", "max_model_len": 64}
engine = Engine(settings, [FakeTokenizer()])
assert engine.parts.registry.selection("model").choices[0].offer.name == "native"
engine.shutdown()
heavy = ("transformers", "huggingface_hub", "sympy", "torch._dynamo", "torchao")
print(*[name for name in heavy if name in sys.modules])
"""


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_common_families_start_without_transformers(family: str, tmp_path: Path) -> None:
    name = save(make_model(family), tmp_path / family)
    run = subprocess.run([sys.executable, "-c", PROGRAM, name], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_reserved_scratch_memory_stays_where_it_is() -> None:
    scratch = Scratch(torch.float32, torch.device("cpu"))
    scratch.reserve("normed", 100, 8)
    first = scratch.get("normed", 1, 8)
    assert scratch.get("normed", 100, 8).data_ptr() == first.data_ptr()
    scratch.reserve("normed", 50, 8)  # less than there is
    assert scratch.num_bytes == 100 * 8 * 4
    assert scratch.get("normed", 200, 8).shape == (200, 8)
    assert scratch.num_bytes == 200 * 8 * 4
