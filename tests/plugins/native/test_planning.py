"""What a configuration's weights will take, told from headers, is what the loaded model says of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from native_kit import CASES, LONGEST, make_model, make_native, save
from test_gguf_models import MODELS, write_gguf
from test_gguf_models import make_model as make_network
from worker_kit import Context

from trivet.errors import ModelLoadError
from trivet_kernels.reference.ops import ReferenceOps
from trivet_native.decoder import Decoder
from trivet_native.families import make_spec
from trivet_native.loading import Loader
from trivet_native.model import NativeModel
from trivet_native.options import NativeOptions
from trivet_native.planning import plan_decoder
from trivet_quantization.gguf import Gguf
from trivet_quantization.int4 import Int4
from trivet_quantization.int8 import Int8
from trivet_quantization.options import GgufOptions, Int4Options, Int8Options
from trivet_torch.weights.stored import open_weights

QUANTIZATIONS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda context: None,
    "int8": lambda context: Int8(context, Int8Options()),
    "int4": lambda context: Int4(context, Int4Options()),
    "int4 but": lambda context: Int4(context, Int4Options(lm_head=False, exclude=("*.v_proj", "*.experts.1.*"))),
    "gguf": lambda context: Gguf(context, GgufOptions()),
}


def native(name: str, quantization: str | None = None, *, dtype: str = "float32", **options: Any) -> NativeModel:
    context: Any = Context(name, max_model_len=LONGEST)
    context.config.dtype = dtype
    context.roles["quantization"] = QUANTIZATIONS[quantization](context)
    return NativeModel(context, NativeOptions(**options))


def compare(model: NativeModel) -> int:
    """The plan, which is made first; compared with what is there when the model is loaded."""
    planned = model.plan_weights()
    model.load()
    assert planned == model.weight_bytes
    model.shutdown()
    return planned


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int4 but"])
@pytest.mark.parametrize("case", CASES)
def test_every_family(case: str, quantization: str | None, tmp_path: Path) -> None:
    name = save(make_model(case), tmp_path)
    compare(native(name, quantization))
    compare(native(name, quantization, dtype="bfloat16"))


@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
@pytest.mark.parametrize("compiled", [False, True])
def test_a_tied_head_is_a_copy_and_embeddings_stay_in_the_file(compiled: bool, tmp_path: Path) -> None:
    sizes = []
    for tied in (False, True):
        name = save(make_model("qwen2", tie_word_embeddings=tied), tmp_path / str(tied))
        sizes.append(compare(native(name, dtype="bfloat16", compile=compiled)))
    assert sizes[0] == sizes[1]


def test_a_type_of_half_the_width_takes_half(tmp_path: Path) -> None:
    name = save(make_model("llama", hidden_size=64, intermediate_size=128, vocab_size=128), tmp_path)
    wide, narrow = (compare(native(name, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    norms = 4 * 64 * (2 * 3 + 1)
    assert narrow - norms == (wide - norms) // 2


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "gguf"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3moe", "mixtral", "gemma3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_gguf_files(name: str, kind: str, quantization: str | None, tmp_path: Path) -> None:
    """Some matrices are blocks; which are not, differs within fused layers."""
    ggml_type = GGMLQuantizationType[kind]

    def quantise(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        for key in list(tensors):
            is_wide = tensors[key].ndim > 1 and tensors[key].shape[-1] % 32 == 0
            if is_wide and not key.endswith(("attn_v.weight", "ffn_gate_inp.weight")):
                writer.add_tensor(key, quants.quantize(tensors.pop(key), ggml_type), raw_dtype=ggml_type)

    path = write_gguf(tmp_path / "model.gguf", make_network(name), MODELS[name][0], change=quantise)
    compare(native(str(path), quantization))


def test_a_head_for_scores(tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=5,
    )  # fmt: skip
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    compare(native(str(tmp_path)))


@pytest.mark.parametrize("case", ["llama", "llama biases, tied", "gemma3", "mixtral"])
def test_an_accelerator_holds_the_embeddings_once(case: str, tmp_path: Path) -> None:
    """Torch's device ``meta`` stands for one: nothing there is packed."""
    name, device, dtype = save(make_model(case), tmp_path), torch.device("meta"), torch.bfloat16
    weights = open_weights(name)
    spec = make_spec(name, weights.config)
    common: dict[str, Any] = {"dtype": dtype, "device": device, "quantization": None, "plain": False}
    ops = ReferenceOps()
    tables = [torch.empty(0)] * len(spec.ropes)
    loader = Loader(weights, spec, **common, ops=ops, tables=tables, max_tokens=8)
    embedding = loader.embedding()
    blocks = [loader.block(index) for index in range(len(spec.layers))]
    decoder = Decoder(spec, embedding, blocks, loader.final_norm(), loader.head(), ops)
    assert plan_decoder(weights, spec, **common, scores=False) == decoder.weight_bytes
    numbers = {key: prod(weights.shape(key)) for key in weights.names}
    vectors = sum(count for key, count in numbers.items() if "norm" in key)
    assert decoder.weight_bytes == 2 * sum(numbers.values()) + 2 * vectors, "norms are in float32"
    weights.close()


# ------------------------------------------------------------------ what is not read


def sparse_llama(folder: Path, **changes: Any) -> dict[str, tuple[int, ...]]:
    """A folder with the headers of a large Llama, and a hole for its weights; returns the shapes."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1 << 17, "hidden_size": 8192,
        "intermediate_size": 28672, "num_hidden_layers": 8, "num_attention_heads": 64, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": False,
    } | changes  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv_size = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return shapes


def test_a_plan_takes_neither_the_weights_memory_nor_their_time(tmp_path: Path) -> None:
    """16 GB of weights of which there is nothing but the header."""
    shapes = sparse_llama(tmp_path)
    matrices = sum(prod(shape) for name, shape in shapes.items() if len(shape) > 1 and name != "model.embed_tokens")
    vectors = sum(prod(shape) for shape in shapes.values() if len(shape) == 1)
    assert native(str(tmp_path), dtype="bfloat16").plan_weights() == 2 * matrices + 4 * vectors
    # A byte each, and a float32 scale for a row.
    rows = sum(shape[0] for name, shape in shapes.items() if len(shape) > 1 and name != "model.embed_tokens")
    assert native(str(tmp_path), "int8").plan_weights() == matrices + rows * 4 + 4 * vectors


def test_what_is_not_there_yet_is_not_known(tmp_path: Path) -> None:
    name = save(make_model("llama"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert native(name).plan_weights() is None
    assert native("nobody-of-this-name/model").plan_weights() is None, "a hub model that nobody has downloaded"


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    sparse_llama(tmp_path, num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 1024}), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"gate_proj.*\[28672, 8192\] instead of \[1024, 8192\]"):
        native(str(tmp_path)).plan_weights()


def test_a_quantization_that_does_not_know_leaves_the_sum_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = save(make_model("llama"), tmp_path)
    asked: list[tuple[str, bool]] = []

    def unknown(self: Any, parts: Any, *, bias: bool) -> None:
        assert not any(part.tensors for part in parts)
        asked.extend((part.name, bias) for part in parts)

    monkeypatch.setattr(Int8, "planned_bytes", unknown)
    assert native(name, "int8").plan_weights() is None
    assert asked == [(f"model.layers.0.self_attn.{part}_proj", False) for part in "qkv"]
    assert make_native(name).plan_weights() is not None
