"""Loading holds the packed weights and little else, however large the file is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers

LAYERS, HIDDEN, VOCABULARY = 4, 1024, 32768
MIB = 1 << 20
# Packs everything from the file named on the command line; prints what the weights take, and what the process took at
# most beyond what it had before.
LOAD = """
import json, sys
import torch
from trivet_torch.linear import make_linear
from trivet_torch.weights.stored import open_weights

def high_water():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024

dtype = torch.bfloat16
weights = open_weights(sys.argv[1])
make_linear([torch.ones(64, 64)], dtype=dtype, device="cpu")
before = high_water()
layers = []
for i in range(weights.config.num_hidden_layers):
    path = f"model.layers.{i}."
    for names in (
        [f"self_attn.{part}_proj" for part in "qkv"], ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"],
    ):
        parts = [weights.matrix(f"{path}{name}.weight", dtype) for name in names]
        layers.append(make_linear(parts, dtype=dtype, device="cpu"))
layers.append(make_linear([weights.matrix("lm_head.weight", dtype)], dtype=dtype, device="cpu"))
rows = weights.rows("model.embed_tokens.weight", torch.arange(0, 32768, 999), dtype)
print(json.dumps({"weights": sum(layer.weight_bytes for layer in layers), "peak": high_water() - before}))
"""


def config() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        eos_token_id=2,
    )


def shapes() -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        for part in "qkvo":
            result[f"model.layers.{i}.self_attn.{part}_proj.weight"] = (HIDDEN, HIDDEN)
        for part, shape in (("gate", (2048, HIDDEN)), ("up", (2048, HIDDEN)), ("down", (HIDDEN, 2048))):
            result[f"model.layers.{i}.mlp.{part}_proj.weight"] = shape
        for part in ("input", "post_attention"):
            result[f"model.layers.{i}.{part}_layernorm.weight"] = (HIDDEN,)
    return result


def write_folder(folder: Path) -> Path:
    """About 200 MiB of zeros in bfloat16, most of which are a hole in the file."""
    folder.mkdir()
    config().save_pretrained(folder)
    header, position = {}, 0
    for name, shape in shapes().items():
        size = int(np.prod(shape)) * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    assert position > 180 * MIB
    return folder


def write_file(path: Path) -> Path:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2048)
    writer.add_head_count(8)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_eos_token_id(2)
    for name, shape in shapes().items():
        target = names.get_name(name, try_suffixes=(".weight",))
        if len(shape) == 1:
            writer.add_tensor(target, np.ones(shape, np.float32))
        else:
            blocks = np.zeros((shape[0], shape[1] // 32 * 34), np.uint8)
            writer.add_tensor(target, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_packing_takes_little_more_memory_than_the_packed_weights(kind: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path / "hf") if kind == "folder" else write_file(tmp_path / "model.gguf")
    output = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], check=True, capture_output=True, text=True, timeout=300
    )
    found = json.loads(output.stdout)
    assert found["weights"] > 120 * MIB
    # The file's pages, or a second copy of the output matrix of 64 MiB, would show.
    assert found["peak"] - found["weights"] < 48 * MIB
