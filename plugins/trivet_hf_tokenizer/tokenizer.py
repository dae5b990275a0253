"""The provider: one tokenizer, from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.errors import RequestError
from trivet.roles.tokenizer import Detokenizer, Tokenizer
from trivet_hf_tokenizer._detokenizer import StreamDetokenizer
from trivet_hf_tokenizer._pieces import Pieces
from trivet_hf_tokenizer.chat_template import DEFAULT, ChatTemplates, read_template

if TYPE_CHECKING:
    from trivet.context import Context
    from trivet_hf_tokenizer._parts import TokenizerParts
    from trivet_hf_tokenizer.options import HFTokenizerOptions


class HFTokenizer(Tokenizer):
    """A tokenizer of the ``tokenizers`` library with its own, incremental way back to text.

    Args:
        parts: The loaded tokenizer.
        chat_template: A Jinja text, a file, or the name of one of the tokenizer's templates, used instead of the
            tokenizer's own; None keeps those.

    Raises:
        ModelLoadError: The chat template cannot be read, or the tokenizer's decoder does not work token by token.
    """

    def __init__(self, parts: TokenizerParts, *, chat_template: str | None = None) -> None:
        self._backend = parts.backend
        self._size = parts.size
        self._bos_token_id = parts.bos_token_id
        self._eos_token_ids = parts.eos_token_ids
        self._pieces = Pieces(parts.backend, parts.source)
        templates = parts.chat_templates
        if chat_template is not None:
            templates = {DEFAULT: read_template(chat_template, templates)}
        self._templates = ChatTemplates(parts.source, templates, parts.special_tokens)

    @classmethod
    def from_path(
        cls, path: str | Path, *, chat_template: str | None = None, trust_remote_code: bool = False
    ) -> HFTokenizer:
        """Load the tokenizer of a folder, a GGUF file, a hub model or ``demo``.

        Args:
            path: A folder with tokenizer files (it need not hold a model), or whatever names a model.
            chat_template: See the class.
            trust_remote_code: Run Python code of the folder if its vocabulary cannot be read otherwise.

        Raises:
            ModelLoadError: A file is missing or damaged, or the tokenizer is of a kind that cannot be used.
        """
        return cls(_load(path, trust_remote_code=trust_remote_code), chat_template=chat_template)

    @property
    def size(self) -> int:
        return self._size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        return self._bos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            raise RequestError(f"prompt: {_why_no_text(text)}", param="prompt") from None
        return ids

    def encode_pair(self, text: str, other: str) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, other).ids
        except (TypeError, UnicodeEncodeError):
            for part in (text, other):
                self.encode(part)  # says which of them is no text, and why
            raise
        return ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        detokenizer = StreamDetokenizer(
            self._pieces,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        return StreamDetokenizer(
            self._pieces,
            prompt_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )

    def token_text(self, token_id: int) -> str:
        return self._pieces[token_id].decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

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
        return self._templates.render(
            messages,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )


def build(context: Context, options: HFTokenizerOptions) -> HFTokenizer:
    """Make the tokenizer that an engine's configuration asks for."""
    config = context.config
    return HFTokenizer.from_path(
        config.tokenizer or _model_name(config.model, config.revision),
        chat_template=options.chat_template or config.chat_template,
        trust_remote_code=config.trust_remote_code,
    )


def _model_name(model: str, revision: str | None) -> str:
    """The model as :func:`trivet.model_source.resolve_model` takes it; a revision means something on the hub only."""
    return model if revision is None or "@" in model or Path(model).exists() else f"{model}@{revision}"


def _load(path: str | Path, *, trust_remote_code: bool) -> TokenizerParts:
    from trivet.model_source import resolve_model
    from trivet_hf_tokenizer.gguf_tokenizer import load_gguf
    from trivet_hf_tokenizer.hf_folder import TOKENIZER_FILES, load_folder

    folder = Path(path).expanduser()
    # A folder that holds a tokenizer and no model is no model location.
    if folder.is_dir() and any(file.is_file() for pattern in TOKENIZER_FILES for file in folder.glob(pattern)):
        return load_folder(folder, trust_remote_code=trust_remote_code)
    location = resolve_model(path, weights=False)
    if location.kind == "gguf":
        return load_gguf(location.path)
    return load_folder(location.path, trust_remote_code=trust_remote_code)


def _why_no_text(text: object) -> str:
    if not isinstance(text, str):
        return f"must be a text, got {type(text).__name__}"
    position = next(i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff")
    return f"is no valid text: half of a surrogate pair, {text[position]!r}, at character {position}"
