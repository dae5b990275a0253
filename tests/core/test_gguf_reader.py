"""The GGUF reader against files that the format's own writer made, and against damaged ones."""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from trivet.errors import ModelLoadError
from trivet.gguf import GGMLType, GGUFFile, eos_token_ids

TOKENS = ["<s>", "ü", "日本", "", "🙂", "a" * 300]


def write_sample(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_int32("some.negative", -7)
    writer.add_uint64("some.large", 2**63)
    writer.add_float32("some.float", 0.5)
    writer.add_float64("some.double", 0.1)
    writer.add_bool("some.flag", val=True)
    writer.add_string("some.text", "grüße\n")
    writer.add_array("tokenizer.ggml.tokens", TOKENS)
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    writer.add_array("tokenizer.ggml.token_type", [1, 2, 3])
    writer.add_array("some.flags", [True, False])
    rng = np.random.default_rng(0)
    writer.add_tensor("a.weight", rng.normal(size=(3, 5)).astype(np.float32))
    writer.add_tensor("b.weight", rng.normal(size=(2, 3, 4)).astype(np.float16))
    quantised = gguf.quants.quantize(rng.normal(size=(4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("c.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "sample.gguf")


def test_scalars_have_python_types(sample: Path) -> None:
    metadata = GGUFFile(sample).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 3
    assert metadata["some.negative"] == -7
    assert metadata["some.large"] == 2**63
    assert metadata["some.float"] == 0.5
    assert metadata["some.double"] == 0.1
    assert metadata["some.flag"] is True
    assert metadata["some.text"] == "grüße\n"
    assert type(metadata["llama.block_count"]) is int
    assert type(metadata["some.float"]) is float


def test_arrays(sample: Path) -> None:
    metadata = GGUFFile(sample).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == len(TOKENS)
    assert list(tokens) == TOKENS
    assert tokens[4] == "🙂"
    assert tokens[1:3] == TOKENS[1:3]
    np.testing.assert_array_equal(metadata["tokenizer.ggml.scores"], np.array([0.5, -1.0, 2.0], np.float32))
    np.testing.assert_array_equal(metadata["tokenizer.ggml.token_type"], np.array([1, 2, 3], np.int32))
    assert metadata["some.flags"].tolist() == [True, False]


def test_tensors_agree_with_the_reference_reader(sample: Path) -> None:
    file = GGUFFile(sample)
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(sample).tensors}
    assert list(file.tensors) == list(reference)
    for name, info in file.tensors.items():
        expected = reference[name]
        assert info.shape == tuple(int(size) for size in reversed(expected.shape))
        assert info.ggml_type == expected.tensor_type
        assert info.nbytes == expected.n_bytes
        assert info.offset == expected.data_offset
        np.testing.assert_array_equal(file.raw(name), expected.data.reshape(-1).view(np.uint8))


def test_raw_bytes_are_read_only_and_outlive_the_file_object(sample: Path) -> None:
    raw = GGUFFile(sample).raw("a.weight")
    assert raw.view(np.float32).shape == (15,)
    with pytest.raises(ValueError, match="read-only"):
        raw[0] = 1


def test_unknown_tensor_is_a_key_error(sample: Path) -> None:
    with pytest.raises(KeyError, match=r"d\.weight"):
        GGUFFile(sample).raw("d.weight")


def test_custom_alignment(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", np.arange(3, dtype=np.float32))
    writer.add_tensor("b", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert file.tensors["b"].offset % 256 == 0
    np.testing.assert_array_equal(file.raw("b").view(np.float32), np.arange(5, dtype=np.float32))


def test_end_of_generation_ids(tmp_path: Path) -> None:
    path = tmp_path / "eos.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_eos_token_id(7)
    writer.add_eot_token_id(5)
    writer.add_uint32("tokenizer.ggml.eom_token_id", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert eos_token_ids(GGUFFile(path)) == [7, 5]


def test_imports_no_torch_and_no_gguf_package() -> None:
    code = "import sys, trivet.gguf; sys.exit(bool({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- damaged files ---------------------------------------------------------------------------------------------------


def header(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, pairs: int = 0) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HUGE = 2**62
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot read"),
    "magic": (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
    "version": (header(version=1), "GGUF version 1 is not supported"),
    "future": (header(version=9), "GGUF version 9 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "short header": (header()[:12], "truncated"),
    "tensor count": (header(tensors=HUGE), "number of tensors"),
    "pair count": (header(pairs=HUGE), "number of metadata entries"),
    "key length": (header(pairs=1) + struct.pack("<Q", HUGE) + bytes(20), "key of metadata entry 0"),
    "string length": (header(pairs=1) + string("k") + struct.pack("<IQ", 8, HUGE), "value of 'k'"),
    "array length": (header(pairs=1) + string("k") + struct.pack("<IIQ", 9, 4, HUGE), "length of array 'k'"),
    "strings length": (header(pairs=1) + string("k") + struct.pack("<IIQ", 9, 8, HUGE), "length of array 'k'"),
    "string in array": (
        header(pairs=1) + string("k") + struct.pack("<IIQ", 9, 8, 2) + struct.pack("<Q", HUGE) + bytes(64),
        "run past the end",
    ),
    "value type": (header(pairs=1) + string("k") + struct.pack("<I", 77) + bytes(8), "unknown value type 77"),
    "nested array": (header(pairs=1) + string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(32), "item type 9"),
    "utf-8": (header(pairs=1) + string(b"\xff\xfe") + struct.pack("<II", 4, 1), "not valid UTF-8"),
    "twice": (header(pairs=2) + (string("k") + struct.pack("<II", 4, 1)) * 2, "'k' occurs twice"),
    "dimensions": (header(tensors=1) + string("w") + struct.pack("<I", 99) + bytes(64), "99 dimensions"),
    "tensor type": (header(tensors=1) + tensor("w", (4,), 99, 0), "'w' has the unknown type 99"),
    "past the end": (header(tensors=1) + tensor("w", (1000,), 0, 0) + bytes(100), "truncated GGUF: tensor 'w'"),
    "overflow": (header(tensors=1) + tensor("w", (HUGE, HUGE), 0, 0) + bytes(100), "truncated GGUF: tensor 'w'"),
    "misaligned": (header(tensors=1) + tensor("w", (4,), 0, 7) + bytes(100), "multiple of the alignment"),
    "partial block": (header(tensors=1) + tensor("w", (33,), 8, 0) + bytes(100), "block size 32"),
    "same tensor": (header(tensors=2) + tensor("w", (4,), 0, 0) * 2 + bytes(100), "'w' occurs twice"),
    "alignment": (
        header(pairs=1) + string("general.alignment") + struct.pack("<II", 4, 3),
        "general.alignment is 3",
    ),
}


@pytest.mark.parametrize("case", sorted(DAMAGED))
def test_damage_is_reported_with_the_file_and_the_fault(case: str, tmp_path: Path) -> None:
    content, message = DAMAGED[case]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_every_truncation_of_a_file_is_refused(sample: Path, tmp_path: Path) -> None:
    content = sample.read_bytes()
    path = tmp_path / "short.gguf"
    # The last tensor's padding carries no data.
    file = GGUFFile(sample)
    end = max(info.offset + info.nbytes for info in file.tensors.values())
    for length in range(1, end, 37):
        path.write_bytes(content[:length])
        with pytest.raises(ModelLoadError, match="short.gguf"):
            GGUFFile(path)


def test_flipped_bytes_never_raise_anything_else_nor_allocate_much(sample: Path, tmp_path: Path) -> None:
    content = bytearray(sample.read_bytes())
    start = min(info.offset for info in GGUFFile(sample).tensors.values())
    path = tmp_path / "flipped.gguf"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng = np.random.default_rng(3)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(600):
        damaged = bytearray(content)
        damaged[rng.integers(start)] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            for value in GGUFFile(path).metadata.values():
                if not isinstance(value, int | float | str):
                    list(value)
        except ModelLoadError:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
    assert min(outcomes.values()) > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024  # KiB


def test_a_string_that_is_not_utf8_is_reported_when_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "tokens.gguf"
    pair = string("tokens") + struct.pack("<IIQ", 9, 8, 2) + string("good") + string(b"\xff")
    path.write_bytes(header(pairs=1) + pair)
    tokens = GGUFFile(path).metadata["tokens"]
    assert len(tokens) == 2
    with pytest.raises(ModelLoadError, match=r"tokens\.gguf: metadata key 'tokens': string 1 is not valid UTF-8"):
        tokens[0]


def test_a_missing_file_is_named_absolutely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="no such GGUF file") as caught:
        GGUFFile("nowhere.gguf")
    assert str(tmp_path / "nowhere.gguf") in str(caught.value)


@pytest.mark.parametrize("name", ["gemma270", "qwen05"])
def test_real_files_are_read_to_their_end(name: str, real_model: Callable[[str], Path]) -> None:
    path = real_model(f"{name}/model.gguf")
    file = GGUFFile(path)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == file.tensors["token_embd.weight"].shape[0]
    assert {info.ggml_type for info in file.tensors.values()} >= {GGMLType.F32, GGMLType.Q5_0, GGMLType.Q6_K}
    assert max(info.offset + info.nbytes for info in file.tensors.values()) <= path.stat().st_size
