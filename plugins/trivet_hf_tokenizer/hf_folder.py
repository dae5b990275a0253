"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.errors import ModelLoadError
from trivet.model_source import read_json
from trivet_hf_tokenizer._parts import TokenizerParts, count_ids, unique
from trivet_hf_tokenizer.chat_template import DEFAULT

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_AGAIN = "download the file again"
# Files of tokenizers that transformers can convert.
_OTHER_VOCABULARIES = (
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
)
TOKENIZER_FILES = ("tokenizer.json", *_OTHER_VOCABULARIES)
"""Patterns of the files that make a folder one with a tokenizer."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA_KEYS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(slots=True)
class _Settings:
    """What the folder's JSON files say about the tokenizer."""

    config: dict[str, Any]
    special_tokens: dict[str, str] = field(default_factory=dict)
    added: list[dict[str, Any]] = field(default_factory=list)
    """Tokens to register: special ones, and those that tokenizer.json may lack, in the order of their ids."""


def load_folder(folder: Path, *, trust_remote_code: bool = False) -> TokenizerParts:
    """Load the tokenizer of a folder.

    Without ``tokenizer.json``, transformers converts what there is (sentencepiece, tiktoken, vocabulary and merges).

    Raises:
        ModelLoadError: A file is missing, damaged or cannot be converted; the message names it.
    """
    if (folder / "tokenizer.json").is_file():
        settings = _read_settings(folder)
        backend = _read_backend(folder / "tokenizer.json")
        _normalise_qwen(backend, settings.config)
        _add_tokens(backend, settings)
        _set_bos_and_eos(backend, settings)
    else:
        backend, settings = _convert(folder, trust_remote_code=trust_remote_code)
    backend.no_truncation()
    backend.no_padding()
    ids = {name: backend.token_to_id(token) for name, token in settings.special_tokens.items()}
    return TokenizerParts(
        source=str(folder),
        backend=backend,
        size=count_ids(backend),
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=unique([ids.get("eos_token"), *_model_eos_ids(folder)]),
        special_tokens=settings.special_tokens,
        chat_templates=_read_templates(folder, settings.config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON file's mapping, an empty one when there is no such file."""
    found: dict[str, Any] = read_json(path) if path.exists() else {}
    return found


def _read_backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(
            f"{path} is truncated, damaged or of an unknown kind: {error}; {_AGAIN}, or set `tokenizer` to another "
            "folder"
        ) from error


def _read_settings(folder: Path) -> _Settings:
    config = _read_json(folder / "tokenizer_config.json")
    settings = _Settings(config)
    declared = {**_read_json(folder / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping) or not all(str(key).isdigit() for key in listed):
        raise ModelLoadError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must map ids to tokens; {_AGAIN}"
        )
    settings.added = [_token(listed[key], special=False) for key in sorted(listed, key=int)]
    known = {token["content"] for token in settings.added}
    for name in _SPECIAL_NAMES:
        if (value := declared.get(name)) is not None:
            token = _token(value, special=True)
            settings.special_tokens[name] = token["content"]
            if token["content"] not in known:
                settings.added.append(token)
    for key in _EXTRA_KEYS:
        extra = declared.get(key) or ()
        for value in extra.values() if isinstance(extra, Mapping) else extra:
            token = _token(value, special=True)
            if token["content"] not in known:
                settings.added.append(token)
    return settings


def _token(value: Any, *, special: bool) -> dict[str, Any]:
    """The arguments of an ``AddedToken`` from a text or from the mapping that such a token is saved as."""
    if isinstance(value, str):
        return {"content": value, "special": special}
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        given = {key: bool(value[key]) for key in _FLAGS if key in value}
        return {"content": value["content"], **given, "special": special or given.get("special", False)}
    raise ModelLoadError(f"tokenizer_config.json: {value!r} is neither a token nor a description of one; {_AGAIN}")


def _add_tokens(backend: Backend, settings: _Settings) -> None:
    """Register the added tokens of the folder's other files; where they differ from tokenizer.json, they win."""
    from tokenizers import AddedToken

    named = set(settings.special_tokens.values())
    present = {token.content: _flags(token) for token in backend.get_added_tokens_decoder().values()}
    changed = []
    for arguments in settings.added:
        content = arguments["content"]
        flags = {**present.get(content, {"normalized": False}), **arguments}
        token = AddedToken(**{**flags, "special": flags["special"] or content in named})
        if _flags(token) != present.get(content):
            changed.append(token)
    backend.add_tokens(changed)


def _flags(token: Any) -> dict[str, bool]:
    return {name: getattr(token, name) for name in _FLAGS}


def _normalise_qwen(backend: Backend, config: Mapping[str, Any]) -> None:
    """Qwen2's tokenizer normalises to NFC; folders made from GGUF files, which cannot say so, have lost it."""
    from tokenizers import normalizers

    if backend.normalizer is None and config.get("tokenizer_class") in {"Qwen2Tokenizer", "Qwen2TokenizerFast"}:
        backend.normalizer = normalizers.NFC()


def _set_bos_and_eos(backend: Backend, settings: _Settings) -> None:
    """``add_bos_token`` and ``add_eos_token``, where given, take the place of what tokenizer.json adds to a text."""
    from tokenizers import processors

    config = settings.config
    if not any(isinstance(config.get(key), bool) for key in ("add_bos_token", "add_eos_token")):
        return
    special = settings.special_tokens
    before = [special["bos_token"]] if config.get("add_bos_token") and "bos_token" in special else []
    after = [special["eos_token"]] if config.get("add_eos_token") and "eos_token" in special else []
    second = [*(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *second],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys([*before, *after])],
    )


def _model_eos_ids(folder: Path) -> Iterable[int]:
    """The ids that end a generation by generation_config.json, or by config.json if that does not name any."""
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config")
    sources = (
        ("generation_config.json", _read_json(folder / "generation_config.json")),
        ("config.json", config),
        ("config.json", text_config if isinstance(text_config, dict) else {}),
    )
    for name, values in sources:
        value = values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise ModelLoadError(
                f"{folder / name}: eos_token_id must be an id or a list of ids, got {value!r}; {_AGAIN}"
            )
        return ids
    return ()


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """All chat templates by name; a file of its own beats an entry of tokenizer_config.json."""
    templates: dict[str, str] = {}
    for path, given in (
        (folder / "tokenizer_config.json", config.get("chat_template")),
        (folder / "chat_template.json", _read_json(folder / "chat_template.json").get("chat_template")),
    ):
        if given is None:
            continue
        named = [{"name": DEFAULT, "template": given}] if isinstance(given, str) else given
        if isinstance(given, Mapping):
            named = [{"name": name, "template": text} for name, text in given.items()]
        for entry in named if isinstance(named, list) else [None]:
            match entry:
                case {"name": str(name), "template": str(text)}:
                    templates[name] = text
                case _:
                    raise ModelLoadError(
                        f"{path}: chat_template must be a text, or a list of names and templates; {_AGAIN}"
                    )
    files = {DEFAULT: folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelLoadError(f"cannot read {path}: {error}; {_AGAIN}") from error
    return templates


def _convert(folder: Path, *, trust_remote_code: bool) -> tuple[Backend, _Settings]:
    """Have transformers build a fast tokenizer from the folder's vocabulary files."""
    if not any(path.is_file() for pattern in _OTHER_VOCABULARIES for path in folder.glob(pattern)):
        raise ModelLoadError(
            f"{folder / 'tokenizer.json'} is missing, and the folder has no other vocabulary "
            f"({', '.join(_OTHER_VOCABULARIES)}); download it, or set `tokenizer` to a folder, GGUF file or hub id "
            "that has the tokenizer"
        )
    _read_settings(folder)  # names a damaged file better than transformers does
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), use_fast=True, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever a converter or code that came with the model raises
        raise ModelLoadError(
            f"{folder} has no tokenizer.json, and transformers cannot convert its vocabulary: {error}. A sentencepiece "
            "vocabulary needs `pip install sentencepiece protobuf`, a tiktoken one `pip install tiktoken`; or set "
            "`tokenizer` to a folder with tokenizer.json"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelLoadError(
            f"{folder}: the tokenizer {type(tokenizer).__name__} exists only in Python and cannot be used; set "
            "`tokenizer` to a folder with tokenizer.json"
        )
    config: dict[str, Any] = {"chat_template": tokenizer.chat_template}
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name in _SPECIAL_NAMES}
    return backend, _Settings(config, named)
