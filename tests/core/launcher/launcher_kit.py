"""What the tests of the command line share: a fake model that an installed distribution brings, and helpers."""

from __future__ import annotations

import importlib
import json
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import yaml

from trivet.testing.fake_model import reference_tokens
from trivet.testing.fakes import FakeTokenizer

VOCAB = 77
_TOKENIZER = FakeTokenizer()


def continuation(prompt: str, count: int) -> str:
    """What the fake model writes after a prompt, computed without the engine."""
    return _TOKENIZER.decode(reference_tokens(_TOKENIZER.encode(prompt), count, vocab_size=VOCAB))


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """The JSON objects on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


class Site:
    """A folder on ``sys.path`` for distributions, and a folder for files."""

    def __init__(self, packages: Path, folder: Path) -> None:
        self.packages, self.folder = packages, folder
        self._modules: list[str] = []

    def install(self, name: str, entry_points: Mapping[str, str], version: str = "1.0") -> None:
        """Make a distribution with ``entry_points``: plugin name → module."""
        info = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        lines = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
        (info / "entry_points.txt").write_text(f"[trivet]\n{lines}", encoding="utf-8")
        importlib.invalidate_caches()

    def plugin(self, name: str, source: str) -> None:
        """Install a plugin whose module has ``source``."""
        header = "from trivet.hookspecs import hookimpl\nfrom trivet.provider import Provider\n"
        module = f"{name}_module"
        (self.packages / f"{module}.py").write_text(header + textwrap.dedent(source), encoding="utf-8")
        self._modules.append(module)
        self.install(f"acme-{name}", {name: module})

    def spoil(self, prefix: str) -> dict[str, Any]:
        """Install a wrapper that makes requests fail whose prompt begins with ``prefix``; returns its section."""
        self.plugin(
            "spoiler",
            f"""
            @hookimpl(wrapper=True)
            def trivet_sample(logits, rows):
                for row, slot in enumerate(rows.row_slots):
                    if rows.tokens[slot, 0] == {_TOKENIZER.encode(prefix)[0]}:
                        logits[row] = float("nan")
                return (yield)
            """,
        )
        return {"extension": [{"use": "spoiler"}]}

    def forget(self) -> None:
        """Drop imported modules."""
        for name in self._modules:
            sys.modules.pop(name, None)

    def config(self, *, plugins: Mapping[str, Any] | None = None, model: Any = None, **sections: Any) -> Path:
        """Write a configuration that uses the fakes."""
        roles: dict[str, Any] = {role: {"use": "fake"} for role in ("runner", "attention", "sampler", "tokenizer")}
        roles["model"] = {"use": "fake", "vocab_size": VOCAB, **(model or {})}
        values = {"model": "demo", "plugins": {**roles, **(plugins or {})}, **sections}
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    def write(self, name: str, *lines: Any) -> Path:
        """Write a file of lines; what is no text becomes JSON."""
        path = self.folder / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        return path

    def start(self, *arguments: Any, **options: Any) -> subprocess.Popen[str]:
        """Run the command in a process of its own, with pipes."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.packages), *sys.path])}
        command = [sys.executable, "-m", "trivet.launcher", *map(str, arguments)]
        pipe = subprocess.PIPE
        options = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True, "env": environment, **options}
        return subprocess.Popen(command, **options)


Run = Callable[..., Result]


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape of a Llama."""
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv_size = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes | {"model.norm.weight": (hidden,)}


def write_zeros(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of zeros in bfloat16."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def model_folder(site: Site, **changes: Any) -> Path:
    """A folder with the configuration of a tiny Llama, changed, and weights of nothing but zeros."""
    folder = site.folder / "model"
    folder.mkdir(exist_ok=True)
    config = {**LLAMA, **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_zeros(folder / "model.safetensors", llama_shapes(config))
    return folder


def model_config(site: Site, model: Path, **values: Any) -> Path:
    """A configuration that serves a model with the bundled plugins."""
    path = site.folder / "config.yaml"
    path.write_text(yaml.safe_dump({"model": str(model), **values}), encoding="utf-8")
    return path


def memory_plan(run: Run, config: Path, *arguments: str) -> dict[str, Any]:
    """What ``trivet config check`` says of memory."""
    result = run("config", "check", config, "--json", *arguments)
    assert result.code == 0, result.err
    plan: dict[str, Any] = json.loads(result.out)["memory"]
    return plan


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of an output file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Id → text of the first output."""
    return {record["id"]: record["outputs"][0]["text"] for record in records if "outputs" in record}
