"""Embeddings looked up in a file or in memory are the same rows, scaled as transformers scales them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from test_gguf_models import MODELS, make_model, write_gguf

from trivet.errors import ModelLoadError
from trivet_torch.embedding import DeviceEmbedding, FileEmbedding
from trivet_torch.weights.stored import open_weights

NAME = "model.embed_tokens.weight"
IDS = torch.tensor([5, 0, 95, 5, 17])


@pytest.fixture(params=["folder", "gguf"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = make_model("gemma3")
    if request.param == "folder":
        model.save_pretrained(tmp_path / "hf")
        return tmp_path / "hf"
    return write_gguf(tmp_path / "model.gguf", model, MODELS["gemma3"][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_transformers(location: Path, dtype: torch.dtype) -> None:
    embed = make_model("gemma3").to(dtype).model.embed_tokens
    want = embed(IDS)
    scale = 64**0.5
    weights = open_weights(location)
    for embedding in (
        FileEmbedding(weights, NAME, dtype=dtype, scale=scale),
        DeviceEmbedding(weights.tensor(NAME, dtype), scale=scale),
    ):
        assert (embedding.num_embeddings, embedding.hidden_size) == (96, 64)
        got = embedding(IDS)
        assert got.dtype == dtype
        assert torch.equal(got, want)
        assert embedding(IDS[:0]).shape == (0, 64)


def test_the_scale_is_rounded_to_the_models_dtype() -> None:
    weight = torch.full((4, 8), 3.0, dtype=torch.bfloat16)
    scale = 640**0.5  # 25.298..., in bfloat16 25.25
    want = weight[:1] * torch.tensor(scale, dtype=torch.bfloat16)
    assert torch.equal(DeviceEmbedding(weight, scale=scale)(torch.tensor([2])), want)


def test_results_may_be_written(location: Path) -> None:
    weights = open_weights(location)
    for embedding in (
        FileEmbedding(weights, NAME, dtype=torch.float32),
        DeviceEmbedding(weights.tensor(NAME, torch.float32)),
    ):
        before = embedding(IDS)
        before.clone().add_(1)
        embedding(IDS).zero_()
        assert torch.equal(embedding(IDS), before)


def test_bytes_in_memory(location: Path) -> None:
    weights = open_weights(location)
    assert FileEmbedding(weights, NAME, dtype=torch.float32).weight_bytes == 0
    assert DeviceEmbedding(weights.tensor(NAME, torch.bfloat16)).weight_bytes == 96 * 64 * 2


def test_a_missing_matrix_is_named(location: Path) -> None:
    with pytest.raises(ModelLoadError, match="hold no tensor 'model.embeddings.weight'"):
        FileEmbedding(open_weights(location), "model.embeddings.weight", dtype=torch.float32)


def resident_bytes(file: Path) -> int:
    """What the process has in memory of a mapped file."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    found, total = False, 0
    for line in lines:
        head = line.split(maxsplit=1)[0]
        if not head.endswith(":"):
            found = line.endswith(str(file))
        elif found and head == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


NUM_ROWS = 8192


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="the system does not tell what is resident")
@pytest.mark.parametrize("at_once", [30, 128, 1500])
def test_lookups_bring_no_other_part_of_the_file_into_memory(tmp_path: Path, at_once: int) -> None:
    config = transformers.LlamaConfig(
        vocab_size=NUM_ROWS, hidden_size=512, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    embedding = FileEmbedding(open_weights(tmp_path), NAME, dtype=torch.float32)
    shuffled = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(0))
    found = [(ids, embedding(ids)) for ids in shuffled[:3000].split(at_once)]
    resident = resident_bytes(file)
    weight = open_weights(tmp_path).tensor(NAME, torch.float32)
    assert all(torch.equal(rows, weight[ids]) for ids, rows in found)
    assert resident < 1 << 20


def test_rows_that_are_not_there_are_refused(location: Path) -> None:
    embedding = FileEmbedding(open_weights(location), NAME, dtype=torch.float32)
    for ids in ([0, 96], [-1]):
        with pytest.raises(IndexError, match="rows must be in \\[0, 96\\)"):
            embedding(torch.tensor(ids))


def test_rows_of_recent_tokens_are_not_read_again(location: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet_torch.embedding._RECENT_BYTES", 8 * 64 * 4)  # of eight tokens
    weights = open_weights(location)
    matrix = weights.tensor(NAME, torch.float32)
    embedding = FileEmbedding(weights, NAME, dtype=torch.float32)
    read: list[int] = []
    rows = weights.rows
    monkeypatch.setattr(
        weights, "rows", lambda name, ids, dtype: (read.extend(ids.tolist()), rows(name, ids, dtype))[1]
    )

    def reads(*tokens: int) -> list[int]:
        read.clear()
        assert torch.equal(embedding(torch.tensor(tokens)), matrix[list(tokens)])
        return read[:]

    assert reads(5, 5, 7) == [5, 7]
    assert reads(7, 5) == []
    assert reads(0, 1, 2, 3) == [0, 1, 2, 3]
    assert reads(4, 6, 5) == [4, 6]  # as many as there is room for
    assert reads(8) == [8]  # in the place of 7, which was wanted before 5
    assert reads(0, 9, 7) == [9, 7]
    assert reads(8, 9, 7, 0) == []
    assert reads(3, 3, 40, 41, 42) == [3, 40, 41, 42]  # a long prompt, of which nothing is kept
    assert reads(5, 41) == [41]
