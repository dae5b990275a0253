"""The script that measures memory runs on a tiny model, and its figures add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "footprint.py"
VOCAB = 64

if not Path("/proc/self/pagemap").is_file():
    pytest.skip("the system does not tell what is in memory", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    made = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(made)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(made / "tokenizer.json"))
    return made


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False)


def test_every_point_is_told(folder: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    ran = run(str(folder), "--work", "short,single", "--json", str(found))
    assert ran.returncode == 0, ran.stderr
    points = json.loads(found.read_text(encoding="utf-8"))
    names = ["import trivet", "import torch", "loaded", "short", "single"]
    assert [point["point"] for point in points] == names
    peaks = [point["peak"] for point in points]
    assert 0 < peaks[0] < peaks[1] <= peaks[2] <= peaks[3] <= peaks[4]
    for point in points[2:]:
        assert point["resident"] <= point["peak"]
        assert point["beyond"] == pytest.approx(point["peak"] - point["weights"] - point["kv"])
    kv = [point["kv"] for point in points[2:]]
    assert kv[0] <= kv[1] <= kv[2]  # pages appear as they are written
    assert kv[2] > 0
    header, _, *rows = ran.stdout.splitlines()
    assert header == "| MiB | peak | resident | weights | KV | beyond | resident beyond |"
    assert [row.split("|")[1].strip() for row in rows] == names


def test_what_cannot_be_run_is_refused(folder: Path) -> None:
    ran = run(str(folder), "--max-model-len", "4", "--work", "short")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "--max-model-len 4 leaves no room for a prompt and 4 tokens out"
    assert "--work: decoding is none of short, mixed" in run(str(folder), "--work", "decoding").stderr
    assert "--max-num-seqs must be at least 1, got 0" in run(str(folder), "--max-num-seqs", "0").stderr
