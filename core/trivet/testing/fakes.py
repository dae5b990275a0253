"""Fake providers as one plugin: pass this module in ``Engine(config, plugins=[trivet.testing.fakes])`` and select
``fake``.

Model, attention, sampler, runner and tokenizer run in numpy and need neither torch nor files, so an engine starts in
milliseconds. Their tokens depend on everything that scheduling and caching could get wrong
(see :mod:`trivet.testing.fake_model`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from trivet.errors import RequestError
from trivet.hookspecs import hookimpl
from trivet.provider import Provider
from trivet.roles import Detokenizer, ModelInfo, Tokenizer
from trivet.worker import StepRunner
from trivet_schemas.options import Options

_TEXT = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?;:-_()[]{}"


class FakeModelOptions(Options):
    """Shape of the fake model."""

    vocab_size: int = Field(64, ge=2)
    """Rows of the LM head."""
    max_model_len: int = Field(512, ge=1)
    """Context length."""
    windows: list[int | None] = Field(default=[None])
    """One entry per layer: null for full attention, or the tokens a layer sees."""
    chunked: list[bool] = Field(default_factory=list)
    """One entry per layer: whether `windows` is the length of chunks in place of a window that slides; layers beyond
    the end of the list slide."""
    eos_token_ids: list[int] = Field(default_factory=list)
    """Ids that end a generation."""


class FakeRunnerOptions(Options):
    """Memory of the fake worker."""

    available_bytes: int = Field(1 << 20, ge=1)
    """What the runner reports as free for the KV cache."""


class FakeRunner(StepRunner):
    """The step logic on numpy arrays."""

    def __init__(self, context: Any, options: FakeRunnerOptions) -> None:
        super().__init__(context)
        self._bytes = options.available_bytes

    def _available_bytes(self, info: ModelInfo) -> int:
        return self._bytes


class FakeDetokenizer(Detokenizer):
    """One character per token, so nothing is ever held back."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters."""
        return "".join(_TEXT[t % len(_TEXT)] for t in token_ids)

    def flush(self) -> str:
        """Nothing."""
        return ""


class FakeTokenizer(Tokenizer):
    """A character is a token: the position in a fixed alphabet."""

    def __init__(self, context: Any = None, options: Any = None) -> None:
        self._ids = {c: i for i, c in enumerate(_TEXT)}

    @property
    def size(self) -> int:
        """Letters of the alphabet."""
        return len(_TEXT)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """None of its own."""
        return ()

    @property
    def bos_token_id(self) -> int | None:
        """None."""
        return None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Letters it lacks become question marks."""
        return [self._ids.get(c, self._ids["?"]) for c in text]

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The letters."""
        return FakeDetokenizer().push(token_ids)

    def detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """A new one."""
        return FakeDetokenizer()

    def token_text(self, token_id: int) -> str:
        """The letter."""
        return _TEXT[token_id % len(_TEXT)]

    def token_bytes(self, token_id: int) -> bytes:
        """The letter's byte."""
        return self.token_text(token_id).encode()

    @property
    def has_chat_template(self) -> bool:
        """A fixed one."""
        return True

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """``role: content`` per message."""
        if not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
            raise RequestError("messages: each must be a mapping with role and content", param="messages")
        text = "".join(f"{m['role']}: {m['content']}." for m in messages)
        return text + ("assistant: " if add_generation_prompt else "")


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The fakes' descriptors."""
    here, model = "trivet.testing.fakes", "trivet.testing.fake_model"
    return [
        Provider("runner", "fake", f"{here}:FakeRunner", options=FakeRunnerOptions),
        Provider("model", "fake", f"{model}:FakeModel", options=FakeModelOptions),
        Provider("attention", "fake", f"{model}:FakeAttention"),
        Provider("sampler", "fake", "trivet.testing.fake_sampler:FakeSampler"),
        Provider("tokenizer", "fake", f"{here}:FakeTokenizer"),
    ]
