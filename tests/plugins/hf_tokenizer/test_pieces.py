"""What single tokens stand for, and decoders that cannot be taken apart."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Regex, decoders

from trivet.errors import ModelLoadError
from trivet_hf_tokenizer._pieces import Pieces


def test_tokens_of_a_byte_level_vocabulary_stand_for_bytes(backends):
    backend = backends["byte-level"]
    pieces = Pieces(backend, "test")
    assert pieces[backend.token_to_id("Ġw")] == b" w"
    assert pieces[backend.token_to_id("Ã©")] == "é".encode()
    assert {pieces[i] for i in range(256)} == {bytes([value]) for value in range(256)}


def test_an_added_token_stands_for_its_own_text(backends):
    backend = type(backends["byte-level"]).from_str(backends["byte-level"].to_str())
    backend.add_tokens([AddedToken("é")])  # in the byte alphabet this character is another byte
    pieces = Pieces(backend, "test")
    assert pieces[backend.token_to_id("é")] == "é".encode()


def test_byte_tokens_of_sentencepiece_stand_for_bytes(backends):
    backend = backends["gemma"]
    pieces = Pieces(backend, "test")
    assert pieces[backend.token_to_id("<0x0A>")] == b"\n"
    assert pieces[backend.token_to_id("<0xFF>")] == b"\xff"
    assert pieces[backend.token_to_id("▁world")] == b" world"


def test_replacements_by_regular_expression_apply_to_each_token(backends):
    backend = type(backends["no decoder"]).from_str(backends["no decoder"].to_str())
    backend.decoder = decoders.Sequence(
        [decoders.Replace(Regex("l+"), "L"), decoders.Strip("h", 1, 0), decoders.Fuse()]
    )
    pieces = Pieces(backend, "test")
    assert pieces[backend.token_to_id("hello")] == b"eLo"
    assert pieces[backend.token_to_id("world")] == b"worLd"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_a_decoder_that_needs_the_whole_text_is_refused_by_name(backends, decoder):
    backend = type(backends["no decoder"]).from_str(backends["no decoder"].to_str())
    backend.decoder = decoder
    with pytest.raises(ModelLoadError, match=r"folder: the decoder .*(CTC|Replace|Strip).*set `tokenizer`"):
        Pieces(backend, "folder")
