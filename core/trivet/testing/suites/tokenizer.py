"""Conformance of ``tokenizer`` providers: decoding everything at once is the reference for decoding bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.errors import RequestError
from trivet.roles import Detokenizer, Tokenizer
from trivet.testing.suites._base import Suite, promised, require

TEXTS = (
    "The capital of France is",
    " one, two,  three,\n\nfour;\tfive",
    "naïve café, größer, 東京, привет",
    "👩‍👩‍👧 emoji 🦙 and e\u0301 combining",
    "def f(x):\n    return x ** 2  # done\n",
)


class TokenizerSuite(Suite):
    """Encodes, decodes, and streams random tokens in random pieces.

    Set :attr:`model` to what holds the tokenizer's files."""

    role: ClassVar[str] = "tokenizer"
    #: texts that are encoded
    texts: ClassVar[Sequence[str]] = TEXTS
    #: decoding what was encoded gives the text back
    lossless: ClassVar[bool] = True
    #: there is a chat template
    chats: ClassVar[bool] = True

    def built(self) -> Tokenizer:
        """A new tokenizer."""
        tokenizer: Tokenizer = self.make(self.engine_context())
        return tokenizer

    @staticmethod
    def stream(detokenizer: Detokenizer, pieces: Sequence[Sequence[int]]) -> str:
        """Everything that a detokenizer gives out."""
        return "".join([*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()])

    # ------------------------------------------------------------------ ids and text

    def test_sizes_and_special_ids(self) -> None:
        """Ids are 0 … size - 1, special ones included."""
        tokenizer = self.built()
        require(tokenizer.size > 0, "there are tokens", Tokenizer.size, size=tokenizer.size)
        special = [*tokenizer.eos_token_ids, *([] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id])]
        outside = [i for i in special if not 0 <= i < tokenizer.size]
        require(not outside, "special ids are ids of the tokenizer", Tokenizer.eos_token_ids, outside=outside)
        for text in self.texts:
            ids = tokenizer.encode(text)
            wrong = [i for i in ids if not (type(i) is int and 0 <= i < tokenizer.size)]
            require(ids and not wrong, "encode returns ids of the tokenizer", Tokenizer.encode, text=text, wrong=wrong)
            plain = tokenizer.encode(text, add_special_tokens=False)
            require(
                tokenizer.bos_token_id is None or plain[0] != tokenizer.bos_token_id,
                "without add_special_tokens nothing is put before a text",
                Tokenizer.encode,
                ids=plain,
            )

    @promised("lossless")
    def test_round_trip(self) -> None:
        """Decoding gives the text back, and so do the tokens' bytes."""
        tokenizer = self.built()
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            found = tokenizer.decode(ids)
            require(
                found == text, "decoding what was encoded gives the text back", Tokenizer.decode, text=text, found=found
            )
            joined = b"".join(tokenizer.token_bytes(i) for i in ids)
            require(
                joined.decode("utf-8", "replace").strip() == text.strip(),
                "a text's bytes are its tokens' bytes",
                Tokenizer.token_bytes,
                text=text,
                found=joined,
            )

    def test_single_tokens(self) -> None:
        """Every token has a text and bytes, for logprobs, and none raises."""
        tokenizer = self.built()
        for token in range(0, tokenizer.size, max(tokenizer.size // 3000, 1)):
            text, data = tokenizer.token_text(token), tokenizer.token_bytes(token)
            kinds = isinstance(text, str) and isinstance(data, bytes)
            require(kinds, "token_text is a str and token_bytes are bytes", Tokenizer.token_text, token=token)
            try:
                exact: str | None = data.decode()
            except UnicodeDecodeError:
                exact = None
            require(
                exact is not None or "\ufffd" in text,
                "part of a character is U+FFFD as text",
                Tokenizer.token_text,
                token=token,
                text=text,
                bytes=data,
            )

    # ------------------------------------------------------------------ streaming

    @pytest.mark.parametrize("skip", [True, False], ids=["skip-special", "keep-special"])
    def test_any_tokens_in_any_pieces(self, skip: bool) -> None:
        """Random tokens, invalid UTF-8 among them, give the same text however they are cut."""
        tokenizer = self.built()
        token = st.one_of(
            st.integers(0, tokenizer.size - 1),
            st.integers(0, min(tokenizer.size, 300) - 1),
            st.sampled_from([i for text in self.texts for i in tokenizer.encode(text)]),
        )

        @self.budget(max_examples=4 * self.examples)
        @given(st.lists(st.lists(token, max_size=6), max_size=10))
        def run(pieces: list[list[int]]) -> None:
            ids = [i for piece in pieces for i in piece]
            whole = tokenizer.decode(ids, skip_special_tokens=skip)
            found = self.stream(tokenizer.detokenizer(skip_special_tokens=skip), pieces)
            require(
                found == whole,
                "what push returned, joined with flush, equals decode of all tokens",
                Detokenizer.flush,
                pieces=pieces,
                found=repr(found),
                decoded=repr(whole),
            )

        run()

    def test_text_in_any_pieces(self) -> None:
        """Texts come out whole, with no character split, and without waiting for the end."""
        tokenizer = self.built()
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            whole = tokenizer.decode(ids)
            for size in (1, 2, 5):
                detokenizer = tokenizer.detokenizer()
                given_out = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
                rest = detokenizer.flush()
                require(
                    "".join(given_out) + rest == whole,
                    "text given out never changes later and never splits a character",
                    Detokenizer,
                    given_out=given_out,
                    flushed=rest,
                    decoded=whole,
                )
                late = len(rest) > 0 and len(rest) > len(tokenizer.decode(ids[-6:]))
                require(not late, "text is given out as soon as it is final", Detokenizer.push, held_back=rest)

    def test_outputs_that_follow_a_prompt(self) -> None:
        """The prompt decides about a leading space: prompt and output together are the whole text."""
        tokenizer = self.built()
        for text in (t for t in self.texts if t.isascii()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            whole = tokenizer.decode(ids)
            for cut in range(1, len(ids)):
                prompt = tokenizer.decode(ids[:cut])
                output = self.stream(tokenizer.detokenizer(ids[:cut]), [ids[cut:]])
                require(
                    prompt + output == whole,
                    "an output's text continues its prompt's",
                    Tokenizer.detokenizer,
                    prompt=repr(prompt),
                    output=repr(output),
                    together=repr(whole),
                )

    def test_threads(self) -> None:
        """All methods may be called from several threads at once."""
        tokenizer = self.built()

        def work(index: int) -> list[Any]:
            found: list[Any] = []
            for text in [*self.texts] * 5:
                ids = tokenizer.encode(f"{text} {index}", add_special_tokens=False)
                found += [ids, tokenizer.decode(ids), self.stream(tokenizer.detokenizer(), [[i] for i in ids])]
                found += [tokenizer.token_text(ids[0]), tokenizer.token_bytes(ids[-1])]
            return found

        alone = [work(index) for index in range(8)]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(work, range(8)))
        require(together == alone, "methods may be called from several threads", Tokenizer)

    # ------------------------------------------------------------------ chat

    @promised("chats")
    def test_conversations(self) -> None:
        """A conversation becomes a prompt with all that was said, in order."""
        tokenizer = self.built()
        require(tokenizer.has_chat_template, "there is a chat template", Tokenizer.has_chat_template)
        said = [("user", "first question"), ("assistant", "first answer"), ("user", "second question")]
        text = tokenizer.chat([{"role": role, "content": content} for role, content in said])
        places = [text.find(content) for _, content in said]
        require(
            -1 not in places and places == sorted(places),
            "what was said is in the prompt, in order",
            Tokenizer.chat,
            prompt=text,
        )
        require(
            bool(tokenizer.encode(text, add_special_tokens=False)),
            "a rendered prompt can be encoded",
            Tokenizer.chat,
            prompt=text,
        )

    @promised("chats")
    @pytest.mark.parametrize("messages", [["hello"], [{"content": "hello"}]], ids=["no-mapping", "no-role"])
    def test_messages_of_a_wrong_shape(self, messages: Any) -> None:
        """They are refused as the request's fault."""
        with pytest.raises(RequestError):
            self.built().chat(messages)
