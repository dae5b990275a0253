"""What a model's own files say about how it is to be used: sampling parameters, how embeddings are made, and how long a
context is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.errors import ModelLoadError, TrivetError
from trivet.model_source import is_hub_id, read_json, resolve_model
from trivet_schemas.errors import ParameterError
from trivet_schemas.sampling import SamplingParams

if TYPE_CHECKING:
    from trivet_schemas.config import EngineConfig

_GENERATION_FILE = "generation_config.json"
#: fields of transformers' generation configuration that have a counterpart, as in vLLM
_SAMPLING_FIELDS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
_POOLING_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


def default_sampling_values(config: EngineConfig) -> dict[str, Any]:
    """The sampling parameters that ``generation_config.json`` recommends, by their names in :class:`SamplingParams`.

    ``config.generation_config`` says where it is: ``auto`` looks beside the model, ``vllm`` nowhere, anything else is a
    folder. A GGUF file recommends nothing.

    Raises:
        ModelLoadError: The folder that was named has no such file, or the file holds what cannot be a parameter.
    """
    source = config.generation_config
    if source == "vllm":
        return {}
    folder = _model_folder(config) if source == "auto" else Path(source).expanduser()
    path = None if folder is None else folder / _GENERATION_FILE
    if path is None or not _is_file(path):
        if source == "auto":
            return {}
        raise ModelLoadError(f"generation_config: {path} does not exist; name a folder that holds one, auto or vllm")
    given = read_json(path)
    values = {ours: given[name] for name, ours in _SAMPLING_FIELDS.items() if given.get(name) is not None}
    try:
        SamplingParams(**values)
    except ParameterError as error:
        raise ModelLoadError(
            f"{path}: {error}; correct it, or set generation_config to vllm, which ignores it"
        ) from None
    return values


def pooling_defaults(folder: Path) -> tuple[str, bool]:
    """How embeddings of the model in ``folder`` are meant: the tokens that count (``last``, ``cls`` or ``mean``), and
    whether they have length 1.

    Models for sentence-transformers list the steps in ``modules.json``. Without it: the last token, and length 1.

    Raises:
        ModelLoadError: A file is damaged, or asks for pooling of another kind.
    """
    listing = folder / "modules.json"
    if not listing.is_file():
        return "last", True
    kind, normalizes = "last", False
    modules = read_json(listing, list)
    for module in modules:
        step = str(module.get("type", "")) if isinstance(module, dict) else ""
        if step.endswith(".Normalize"):
            normalizes = True
        elif step.endswith(".Pooling"):
            path = folder / str(module.get("path", "")) / "config.json"
            chosen = [
                name for name, value in read_json(path).items() if name.startswith("pooling_mode_") and value is True
            ]
            if len(chosen) != 1 or chosen[0] not in _POOLING_MODES:
                known = ", ".join(_POOLING_MODES)
                raise ModelLoadError(
                    f"{path}: pools by {', '.join(chosen) or 'nothing'}; embeddings are made by one of {known}"
                )
            kind = _POOLING_MODES[chosen[0]]
    return kind, normalizes


def _model_folder(config: EngineConfig) -> Path | None:
    """The folder of the model's files on this machine; None for a single file, and where there is no such model."""
    if is_hub_id(config.model):
        try:
            from huggingface_hub import try_to_load_from_cache
        except ImportError:  # then the model came from elsewhere
            return None
        name, _, revision = config.model.partition("@")
        found: Any = try_to_load_from_cache(name, _GENERATION_FILE, revision=config.revision or revision or None)
        return Path(found).parent if isinstance(found, str) else None
    try:
        location = resolve_model(config.model)
    except TrivetError:  # a model that its provider makes of nothing
        return None
    return location.path if location.kind == "hf" else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file system takes
        return False


# ---------------------------------------------------------------------- context


def context_length(config: Mapping[str, Any], positions: int, wanted: int | None) -> int:
    """Positions that a model has in an engine with the given ``max_model_len``.

    With rotary embeddings of the type ``longrope`` that is the original context unless more is asked for, since the
    factors for more serve short prompts less well; so it is in vLLM. ``dynamic`` reaches beyond ``positions`` as far as
    its factor says, if that is asked for.

    Args:
        config: The decoder's configuration: fields as in ``config.json``.
        positions: What it calls ``max_position_embeddings``.
        wanted: ``max_model_len`` as configured.
    """
    longest = positions
    for parameters in _rope_parameters(config):
        kind = _rope_kind(parameters)
        if kind == "longrope" and wanted is None:
            longest = min(longest, _original_length(parameters, config) or positions)
        elif kind == "dynamic" and wanted is not None and wanted > positions:
            longest = int(positions * (parameters.get("factor") or 1.0))
    return longest


def rope_limits(config: Mapping[str, Any], positions: int) -> Iterator[tuple[str, int]]:
    """``(type, length)`` for each set of rotary frequencies that changes in sequences of more than ``length`` tokens;
    arguments as in :func:`context_length`."""
    for parameters in _rope_parameters(config):
        kind = _rope_kind(parameters)
        limit = positions if kind == "dynamic" else _original_length(parameters, config)
        if kind in {"longrope", "dynamic"} and limit is not None:
            yield kind, limit


def _rope_parameters(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rope parameters of the model, or one by one those of its layer types."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(given, Mapping):
        yield from [value for value in given.values() if isinstance(value, Mapping)] or [given]


def _rope_kind(parameters: Mapping[str, Any]) -> str:
    """By its name of today: ``su`` was Phi-3's for ``longrope``."""
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    return "longrope" if kind == "su" else "dynamic" if "dynamic" in kind else kind


def _original_length(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """The context that the model was first trained for."""
    name = "original_max_position_embeddings"
    found = parameters.get(name) or config.get(name)
    return found if isinstance(found, int) else None
