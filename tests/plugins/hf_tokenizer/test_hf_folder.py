"""Tokenizers of Hugging Face folders: which files count, and what is said about damaged ones."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tokenizers import processors

from trivet.errors import ModelLoadError
from trivet_hf_tokenizer.tokenizer import HFTokenizer

HI = [{"role": "user", "content": "hi"}]
SPECIAL = {"bos_token": "<|start|>", "eos_token": "<|end|>"}


def test_ids_and_size_are_those_of_tokenizer_json(backends, save):
    backend = backends["byte-level"]
    tokenizer = HFTokenizer.from_path(save(backend, tokenizer_config=SPECIAL))
    text = "<|start|>hello world<tool>é<|end|>"
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.size == backend.get_vocab_size()
    assert tokenizer.bos_token_id == backend.token_to_id("<|start|>")
    assert tokenizer.eos_token_ids == (backend.token_to_id("<|end|>"),)


def test_truncation_and_padding_saved_with_a_tokenizer_are_off(backends, save):
    backend = type(backends["byte-level"]).from_str(backends["byte-level"].to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    assert len(HFTokenizer.from_path(save(backend)).encode("hello world, hello world")) not in {2, 64}


def test_generations_end_by_the_generation_config_and_the_tokenizer(backends, save):
    folder = save(
        backends["byte-level"],
        tokenizer_config=SPECIAL,
        generation_config={"eos_token_id": [5, 7]},
        config={"eos_token_id": 9},
    )
    assert set(HFTokenizer.from_path(folder).eos_token_ids) == {5, 7, backends["byte-level"].token_to_id("<|end|>")}


@pytest.mark.parametrize("config", [{"eos_token_id": [9, 4]}, {"text_config": {"eos_token_id": [9, 4]}}])
def test_without_a_generation_config_the_model_config_says_what_ends_a_generation(backends, save, config):
    folder = save(backends["byte-level"], config=config, generation_config={"temperature": 0.6})
    assert HFTokenizer.from_path(folder).eos_token_ids == (9, 4)


def test_tokens_of_the_configuration_are_added_and_special(backends, save):
    backend = backends["byte-level"]
    new = {
        "content": "<new>",
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        "special": True,
    }
    size = backend.get_vocab_size()
    config = {"pad_token": "<pad>", "added_tokens_decoder": {str(size): new}, "additional_special_tokens": ["<tool>"]}
    tokenizer = HFTokenizer.from_path(save(backend, tokenizer_config=config))
    assert tokenizer.encode("<new><pad>") == [size, size + 1]
    assert tokenizer.size == size + 2
    # <tool> is an ordinary added token in tokenizer.json, and special by the configuration.
    assert tokenizer.decode(tokenizer.encode("h<tool><new>e")) == "he"


def test_flags_of_an_added_token_in_the_configuration_win(backends, save):
    backend = backends["byte-level"]
    tool = {
        "content": "<tool>",
        "lstrip": True,
        "rstrip": True,
        "normalized": False,
        "single_word": False,
        "special": False,
    }
    config = {"added_tokens_decoder": {str(backend.token_to_id("<tool>")): tool}}
    tokenizer = HFTokenizer.from_path(save(backend, tokenizer_config=config))
    assert tokenizer.decode(tokenizer.encode("h <tool> e")) == "h<tool>e"


def test_special_tokens_may_stand_in_their_own_file(backends, save):
    folder = save(backends["byte-level"], special_tokens_map={"eos_token": {"content": "<|end|>"}})
    assert HFTokenizer.from_path(folder).eos_token_ids == (backends["byte-level"].token_to_id("<|end|>"),)


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_flags_for_bos_and_eos_replace_what_tokenizer_json_adds(backends, save, bos, eos):
    backend = type(backends["byte-level"]).from_str(backends["byte-level"].to_str())
    start, end = (backend.token_to_id(token) for token in SPECIAL.values())
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", "<|start|>"], special_tokens=[("<|start|>", start)]
    )
    folder = save(backend, tokenizer_config={**SPECIAL, "add_bos_token": bos, "add_eos_token": eos})
    tokenizer = HFTokenizer.from_path(folder)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [start] * bos + plain + [end] * eos


def test_qwens_normalisation_is_restored_where_a_conversion_lost_it(backends, save):
    folder = save(backends["byte-level"], tokenizer_config={"tokenizer_class": "Qwen2Tokenizer"})
    tokenizer = HFTokenizer.from_path(folder)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_the_filling_behind_a_vocabulary_is_not_counted(backends, save):
    backend = backends["byte-level"]
    spec = json.loads(backend.to_str())
    size = backend.get_vocab_size()
    spec["model"]["vocab"] |= {token["content"]: token["id"] for token in spec["added_tokens"]}
    spec["model"]["vocab"] |= {f"[PAD{size + i}]": size + i for i in range(3)}
    tokenizer = HFTokenizer.from_path(save(type(backend).from_str(json.dumps(spec))))
    assert tokenizer.size == size


# ---------------------------------------------------------------------------------------------- chat templates


def test_a_template_file_beats_the_configuration(backends, save):
    folder = save(
        backends["byte-level"], tokenizer_config={"chat_template": "config"}, chat_template={"chat_template": "json"}
    )
    assert HFTokenizer.from_path(folder).chat(HI) == "json"
    (folder / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert HFTokenizer.from_path(folder).chat(HI) == "file"


def test_named_templates_are_chosen_by_name_and_by_tools(backends, save):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools|length }} tools"}]
    folder = save(backends["byte-level"], tokenizer_config={"chat_template": named})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag", encoding="utf-8")
    tokenizer = HFTokenizer.from_path(folder)
    assert tokenizer.chat(HI) == "plain"
    assert tokenizer.chat(HI, tools=[{}, {}]) == "2 tools"
    assert tokenizer.chat(HI, chat_template="rag") == "rag"


# ------------------------------------------------------------------------------------- folders without tokenizer.json


def test_vocabulary_and_merges_are_converted(backends, save):
    spec = json.loads(backends["byte-level"].to_str())
    folder = save(
        vocab=spec["model"]["vocab"], tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"}
    )
    merges = "\n".join(" ".join(pair) for pair in spec["model"]["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    tokenizer = HFTokenizer.from_path(folder)
    assert tokenizer.encode("hello world") == backends["byte-level"].encode("hello world").ids
    assert tokenizer.decode(tokenizer.encode("hello é 👍")) == "hello é 👍"


def test_a_vocabulary_that_cannot_be_converted_is_named_with_the_remedy(save):
    folder = save(config={"model_type": "llama"}, tokenizer_config={"tokenizer_class": "LlamaTokenizer"})
    (folder / "tokenizer.model").write_bytes(b"\x00garbage")
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json.*pip install sentencepiece.*set `tokenizer`"):
        HFTokenizer.from_path(folder)


def test_transformers_and_torch_stay_unloaded_when_there_is_a_tokenizer_json(backends, save):
    folder = save(backends["byte-level"], tokenizer_config=SPECIAL)
    program = (
        "import sys; from trivet_hf_tokenizer.tokenizer import HFTokenizer\n"
        f"HFTokenizer.from_path({str(folder)!r}).decode([1, 2])\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------------- damage


def test_a_missing_tokenizer_is_named(save):
    folder = save(config={"model_type": "llama"})
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing.*set `tokenizer`"):
        HFTokenizer.from_path(folder)


def test_a_truncated_tokenizer_is_named(backends, save):
    path = save(backends["byte-level"]) / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is truncated, damaged.*download the file again"):
        HFTokenizer.from_path(path.parent)


@pytest.mark.parametrize(
    "name", ["tokenizer_config", "special_tokens_map", "generation_config", "config", "chat_template"]
)
@pytest.mark.parametrize("content", [b'{"a": ', b"\xff\xfe", b"[1]", b"[" * 200_000], ids=range(4))
def test_a_damaged_file_is_named(backends, save, name, content):
    folder = save(backends["byte-level"])
    (folder / f"{name}.json").write_bytes(content)
    with pytest.raises(
        ModelLoadError, match=rf"{name}\.json(: cannot be read as JSON| must hold a JSON object).*again"
    ):
        HFTokenizer.from_path(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"generation_config": {"eos_token_id": "</s>"}},
            r"generation_config\.json: eos_token_id must be an id or a list",
        ),
        ({"tokenizer_config": {"eos_token": 7}}, r"tokenizer_config\.json: 7 is neither a token nor"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, r"added_tokens_decoder must map ids to tokens"),
        ({"tokenizer_config": {"chat_template": [1]}}, r"chat_template must be a text, or a list"),
    ],
)
def test_a_value_of_the_wrong_shape_is_named(backends, save, files, message):
    with pytest.raises(ModelLoadError, match=message):
        HFTokenizer.from_path(save(backends["byte-level"], **files))
