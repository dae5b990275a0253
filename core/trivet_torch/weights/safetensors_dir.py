"""Hugging Face folders: ``config.json`` and safetensors, checked before anything is loaded.

Format: https://huggingface.co/docs/safetensors (an 8-byte length, a JSON header, the data).
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trivet.errors import ModelLoadError
from trivet.model_source import read_json
from trivet_torch.weights._listing import listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

_logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation
_RECONVERT = "download the model again, or convert it with transformers' save_pretrained"


def load_folder(
    folder: Path, *, dtype: torch.dtype, device: str | torch.device, attn_implementation: str, trust_remote_code: bool
) -> PreTrainedModel:
    """Load the causal language model in ``folder`` in ``dtype``.

    Only the files of the index are read if there is one, whatever other weights lie beside them.

    Raises:
        ModelLoadError: The folder is incomplete or damaged (see :func:`check_folder`), transformers cannot build the
            model, or a parameter has no tensor in the files; names what is concerned.
    """
    from transformers import AutoModelForCausalLM

    files = check_folder(folder)
    config = folder_config(folder, trust_remote_code=trust_remote_code)
    factory: Any = AutoModelForCausalLM  # its methods carry no annotations
    try:
        # transformers prefers model.safetensors to the index if a folder has both.
        config.transformers_weights = _INDEX if (folder / _INDEX).is_file() else files[0].name
        with _no_progress_bar():
            model, report = factory.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported, and refused below with their names
            )
        del model.config.transformers_weights
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise ModelLoadError(f"{folder}: transformers cannot load this model: {error}") from error
    if report["missing_keys"]:
        raise ModelLoadError(
            f"{folder}: the weights hold no tensor for the parameters {listed(report['missing_keys'])}; they belong to "
            f"another model than config.json or are incomplete: {_RECONVERT}"
        )
    mismatched = [
        f"{name} ({list(found)} instead of {list(needed)})" for name, found, needed in report["mismatched_keys"]
    ]
    if mismatched:
        raise ModelLoadError(
            f"{folder}: tensors have another shape than config.json asks for: {listed(mismatched)}; {_RECONVERT}"
        )
    if report["unexpected_keys"]:
        _logger.warning("%s: the model has no use for the tensors %s", folder, listed(report["unexpected_keys"]))
    loaded: PreTrainedModel = model.to(device)
    return loaded


def folder_config(folder: Path, *, trust_remote_code: bool) -> Any:
    """The transformers configuration in ``folder``.

    Raises:
        ModelLoadError: transformers does not know or accept it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ModelLoadError(
            f"{folder / 'config.json'}: transformers cannot use this configuration: {error}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of ``config.json``. Raises :class:`ModelLoadError` if it cannot be read."""
    fields: dict[str, Any] = read_json(folder / "config.json")
    return fields


def folder_eos_token_ids(folder: Path, config: Any) -> list[int]:
    """Ids that end a generation, the main one first: of ``generation_config.json``, else of ``config``.

    Raises:
        ModelLoadError: What the file says is no id and no list of ids.
    """
    generation = folder / "generation_config.json"
    value, source = None, generation
    if generation.is_file():
        value = read_json(generation).get("eos_token_id")
    if value is None:
        value, source = config.eos_token_id, folder / "config.json"
    if value is None:
        return []
    ids = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelLoadError(
            f"{source}: eos_token_id must be a token id or a list of them, got {value!r}; correct it there"
        )
    return ids


def check_folder(folder: Path) -> list[Path]:
    """Check the folder's configuration and the extent of its weight files; reads headers only.

    Returns:
        The weight files to load: the index's, or the single file.

    Raises:
        ModelLoadError: The folder, ``config.json`` or the weights are missing or damaged; names the file.
    """
    if not folder.is_dir():
        raise ModelLoadError(f"missing model folder: {folder.absolute()} does not exist; correct the path of the model")
    config = folder / "config.json"
    if not config.is_file():
        raise ModelLoadError(f"{folder} has no config.json; name a folder that contains a Hugging Face model")
    read_json(config)
    if (folder / _INDEX).is_file():
        return _check_index(folder)
    if (folder / _SINGLE).is_file():
        check_safetensors(folder / _SINGLE)
        return [folder / _SINGLE]
    others = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".safetensors"})
    if others:
        raise ModelLoadError(
            f"{folder} has no {_SINGLE} and no {_INDEX}, only {listed(others)}, which is not supported; {_RECONVERT}"
        )
    raise ModelLoadError(f"{folder} has no weights: neither {_SINGLE} nor {_INDEX} is there; {_RECONVERT}")


def has_weights(folder: Path) -> bool:
    """Whether there are any weights in ``folder`` as safetensors; they may be incomplete."""
    return any(folder.glob("*.safetensors"))


def _check_index(folder: Path) -> list[Path]:
    index = folder / _INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelLoadError(f"{index}: it has no 'weight_map' of tensor names to files; {_RECONVERT}")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{folder}: the index {_INDEX} names files that are missing: {listed(missing)}; "
            "the download or copy is incomplete: fetch them"
        )
    present = {name: check_safetensors(folder / name) for name in names}
    absent = sorted(tensor for tensor, name in weight_map.items() if tensor not in present[name])
    if absent:
        raise ModelLoadError(
            f"{folder}: the index {_INDEX} places tensors in files that lack them: {listed(absent)}; {_RECONVERT}"
        )
    return [folder / name for name in names]


def check_safetensors(path: Path) -> frozenset[str]:
    """Check that a safetensors file is as long as its header says.

    Returns:
        The names of its tensors.

    Raises:
        ModelLoadError: The file is truncated, or is not safetensors.
    """
    return frozenset(read_header(path)[0])


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Read the header of a safetensors file and check that the file is as long as it says.

    Returns:
        Tensor name -> its entry (``dtype``, ``shape``, ``data_offsets``), and the position in the file that the offsets
        count from.

    Raises:
        ModelLoadError: The file is truncated, or is not safetensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES or (size >= 8 and length < 2):
            raise ModelLoadError(f"{path}: not a safetensors file (its header would be {length} bytes); {_RECONVERT}")
        if 8 + length > size:
            raise _truncated(path, 8 + length, size)
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        needed = 8 + length + int(end)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{path}: the header of this safetensors file is damaged ({error}); {_RECONVERT}"
        ) from error
    if needed > size:
        raise _truncated(path, needed, size)
    return header, 8 + length


def _truncated(path: Path, needed: int, size: int) -> ModelLoadError:
    return ModelLoadError(
        f"{path}: truncated safetensors: the header promises {needed} bytes, the file has {size}; "
        "the download or copy is incomplete: fetch the file again"
    )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers' bar off the terminal: reading a checked folder takes seconds."""
    from transformers.utils import logging

    transformers_logging: Any = logging  # its functions carry no annotations
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
