"""The perplexity benchmark, on a short piece of its text with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "perplexity.py"


@pytest.mark.model
def test_a_line_per_configuration(demo_model: Path) -> None:
    options = ["--tokens", "24", "--window", "16", "--output-len", "3", "--repeat", "1", "--dtype", "float32"]
    configurations = ["--quantization", "none", "--config", '{"use": "gguf", "activations": "int16"}']
    command = [sys.executable, str(SCRIPT), str(demo_model), *options, *configurations]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    plain, blocks = map(json.loads, lines[:2])
    assert plain["weights"] == "none"
    assert blocks["weights"] == '{"use": "gguf", "activations": "int16"}'
    # The first of 16 tokens and the first of the other 8 are not predicted.
    assert plain["tokens"] == 22
    assert 1 < plain["perplexity"] < 10_000
    assert blocks["perplexity"] == pytest.approx(plain["perplexity"], rel=0.01)
    assert blocks["perplexity"] != plain["perplexity"]
    for line in (plain, blocks):
        assert line["single_stream_tokens_per_s"] > 0
    assert lines[-2].startswith("| none |")
    assert "+0.00%" in lines[-2]
