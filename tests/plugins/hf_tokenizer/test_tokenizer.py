"""The provider as an engine uses it: configuration, errors, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from trivet.errors import ModelLoadError, RequestError
from trivet_hf_tokenizer.options import HFTokenizerOptions
from trivet_hf_tokenizer.plugin import trivet_providers
from trivet_hf_tokenizer.tokenizer import HFTokenizer, build
from trivet_schemas.config import EngineConfig

HI = [{"role": "user", "content": "hi"}]


def built(options: HFTokenizerOptions | None = None, **config: object) -> HFTokenizer:
    return build(SimpleNamespace(config=EngineConfig(**config)), options or HFTokenizerOptions())


def test_the_descriptor_names_what_it_builds():
    (provider,) = trivet_providers()
    assert (provider.role, provider.name) == ("tokenizer", "hf_tokenizer")
    assert provider.factory == f"{build.__module__}:{build.__name__}"
    assert provider.options == f"{HFTokenizerOptions.__module__}:{HFTokenizerOptions.__name__}"


def test_the_tokenizer_comes_with_the_model(backends, save):
    folder = save(backends["byte-level"], config={"model_type": "llama"})
    assert built(model=str(folder)).encode("hello") == backends["byte-level"].encode("hello").ids


def test_another_place_for_the_tokenizer_wins_over_the_model(backends, save, tmp_path):
    folder = save(backends["byte-level"])  # tokenizer files only
    assert built(model="no/such-model", tokenizer=str(folder)).size == backends["byte-level"].get_vocab_size()


def test_a_revision_is_no_part_of_a_local_folders_name(backends, save):
    folder = save(backends["byte-level"])
    assert built(model=str(folder), revision="main").size == backends["byte-level"].get_vocab_size()


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"nowhere does not exist"):
        built(model=str(tmp_path / "nowhere"))


def test_a_configured_template_replaces_all_of_the_tokenizers(backends, save):
    named = [{"name": "default", "template": "own"}, {"name": "tool_use", "template": "tools"}]
    folder = save(backends["byte-level"], tokenizer_config={"chat_template": named})
    configured = built(model=str(folder), chat_template="{{ 'configured' }}")
    assert configured.chat(HI) == configured.chat(HI, tools=[{}]) == "configured"
    by_option = built(
        HFTokenizerOptions(chat_template="{{ 'option' }}"), model=str(folder), chat_template="{{ 'configured' }}"
    )
    assert by_option.chat(HI) == "option"
    assert built(model=str(folder), chat_template="tool_use").chat(HI) == "tools"


def test_whether_there_is_a_template_is_known(backends, save):
    folder = save(backends["byte-level"])
    assert not built(model=str(folder)).has_chat_template
    assert built(model=str(folder), chat_template="{{ 1 }}").has_chat_template


@pytest.mark.parametrize(
    ("text", "message"), [("a\ud800b", "surrogate pair, '\\\\ud800', at character 1"), (None, "got NoneType")]
)
def test_what_is_no_text_is_refused(backends, save, text, message):
    tokenizer = HFTokenizer.from_path(save(backends["byte-level"]))
    with pytest.raises(RequestError, match=f"prompt: .*{message}") as info:
        tokenizer.encode(text)
    assert info.value.param == "prompt"


def test_single_tokens_have_text_and_bytes(backends, save):
    tokenizer = HFTokenizer.from_path(save(backends["byte-level"]))
    (wor,) = tokenizer.encode(" wor")
    assert (tokenizer.token_text(wor), tokenizer.token_bytes(wor)) == (" wor", b" wor")
    half = tokenizer.encode("👍")[0]
    assert (tokenizer.token_text(half), tokenizer.token_bytes(half)) == ("\ufffd", "👍".encode()[:1])
    (special,) = tokenizer.encode("<|end|>")
    assert tokenizer.token_text(special) == "<|end|>"


def test_a_leading_blank_is_part_of_a_sentencepiece_token(backends, save):
    tokenizer = HFTokenizer.from_path(save(backends["llama"]))
    assert tokenizer.token_text(backends["llama"].token_to_id("▁world")) == " world"


def test_threads_share_a_tokenizer(backends, save):
    tokenizer = HFTokenizer.from_path(
        save(backends["llama"], tokenizer_config={"chat_template": "{{ messages[0].content }}"})
    )
    texts = [f"hello wörld {i} 👍 日本" * (i % 7) for i in range(200)]

    def work(text: str) -> str:
        ids = tokenizer.encode(tokenizer.chat([{"role": "user", "content": text}]), add_special_tokens=False)
        detokenizer = tokenizer.detokenizer()
        return "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, texts)) == texts


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_pairs_are_encoded_as_in_transformers(backends, save, kind):
    from transformers import PreTrainedTokenizerFast

    folder = save(backends[kind], config={"model_type": "llama"})
    original = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer = built(model=str(folder))
    assert tokenizer.encode_pair("hello world", "world hello") == original("hello world", "world hello")["input_ids"]
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        tokenizer.encode_pair("hello", "\ud800")


def test_both_texts_of_a_pair_begin_and_end_as_the_configuration_says(backends, save):
    flags = {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = built(model=str(save(backends["llama"], config={"model_type": "llama"}, tokenizer_config=flags)))
    one, other = tokenizer.encode("hello"), tokenizer.encode("world")
    assert (one[0], one[-1]) == (tokenizer.bos_token_id, *tokenizer.eos_token_ids)
    assert tokenizer.encode_pair("hello", "world") == [*one, *other]
