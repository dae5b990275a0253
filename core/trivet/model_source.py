"""Where a model's files are: a folder, a GGUF file, a hub id, or the demo model."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trivet.errors import ModelLoadError

logger = logging.getLogger("trivet.model")

#: seconds for a file of some KB
_HUB_TIMEOUT = 10
# What a hub model's snapshot needs: weights as safetensors, configuration, tokenizer, chat template, and code that a
# model may bring (run only with trust_remote_code).
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py"]
# Copies of the weights for other programs.
_HUB_IGNORED = ["original/*", "onnx/*", "openvino/*", "consolidated*.safetensors"]

_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """A model's files on this machine.

    Attributes:
        kind: ``hf`` for a folder with ``config.json``, ``gguf`` for a GGUF file.
        path: The folder or the file; absolute.
        revision: The commit of a hub model; ``None`` for local files.
    """

    kind: Literal["hf", "gguf"]
    path: Path
    revision: str | None = None


def resolve_model(name: str | Path, *, weights: bool = True) -> ModelLocation:
    """Find the files of the model ``name``; downloads a hub model that is not in the hub's cache yet.

    Args:
        name: In this order: ``demo``; an existing GGUF file; an existing folder that holds ``config.json`` or exactly
            one GGUF file; a hub id ``owner/name``, with a branch, tag or commit after ``@`` if wanted.
        weights: False to leave a hub model's weights where they are, for those who want only its tokenizer; the hub id
            may then be one without a model.

    Raises:
        ModelLoadError: Nothing is there, the folder holds no model or several, or the hub cannot be reached or refuses.
    """
    if name == "demo":
        from trivet.demo import demo_model_path

        return ModelLocation("gguf", demo_model_path().absolute())
    if not str(name):
        raise ModelLoadError("the name of the model is empty; set `model` to a folder, a GGUF file, a hub id or `demo`")
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        return _resolve_folder(path)
    if path.is_file():
        return _resolve_file(path)
    match = _HUB_ID.fullmatch(str(name))
    if isinstance(name, Path) or match is None or _looks_local(str(name)):
        what = "GGUF file" if path.suffix == ".gguf" else "model folder"
        raise ModelLoadError(
            f"missing {what}: {path} does not exist; correct `model`, or download the model to that place"
        )
    return _resolve_hub(match["id"], match["revision"], weights=weights)


def find_model(name: str, revision: str | None = None) -> ModelLocation | None:
    """As :func:`resolve_model`, for what is on this machine already: None for a hub model that is not in the hub's
    cache. Of one that is, some files may be missing.

    Args:
        name: What the configuration calls the model.
        revision: Of a hub model whose ``name`` has none.

    Raises:
        ModelLoadError: As :func:`resolve_model`, except that the hub is not asked.
    """
    if not is_hub_id(name):
        return resolve_model(name)
    from huggingface_hub import try_to_load_from_cache

    repository, _, named = name.partition("@")
    found = try_to_load_from_cache(repository, "config.json", revision=named or revision)
    return ModelLocation("hf", Path(found).parent, named or revision) if isinstance(found, str) else None


def hub_config(name: str, revision: str | None = None) -> dict[str, Any] | None:
    """The ``config.json`` of a hub model, fetched alone (some KB) and not kept; asks once, and not where the hub's
    client is told to be offline.

    Args:
        name: A hub id, with a revision after ``@`` if wanted.
        revision: Of a ``name`` that has none.

    Returns:
        None where the hub cannot be reached, refuses, or has no such file, or one that holds no object.
    """
    from huggingface_hub import get_session, get_token, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    repository, _, named = name.partition("@")
    transport_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        url = hf_hub_url(repository, "config.json", revision=named or revision)
        token = get_token()
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        response = get_session().get(url, headers=headers, timeout=_HUB_TIMEOUT)
        response.raise_for_status()
        found = response.json()
    except (OSError, ValueError, HFValidationError, transport_error) as error:
        logger.debug("config.json of the hub model %r cannot be fetched: %s", name, error)
        return None
    return found if isinstance(found, dict) else None


def read_json(path: Path, kind: type[Any] = dict) -> Any:
    """What a JSON file of a model holds: an object, or with ``kind=list`` an array.

    Raises:
        ModelLoadError: The file is missing, damaged, or holds something else; names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise ModelLoadError(f"cannot read {path}: {reason}; check the file and its permissions") from error
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or nested too deep
        raise ModelLoadError(
            f"{path}: cannot be read as JSON ({error}); it is truncated or damaged: download the file again"
        ) from error
    if not isinstance(value, kind):
        wanted = "object" if kind is dict else "array"
        raise ModelLoadError(f"{path} must hold a JSON {wanted}, got {type(value).__name__}; download the file again")
    return value


def is_hub_id(name: str) -> bool:
    """Whether :func:`resolve_model` would ask the hub for the model ``name``, because nothing here has that name."""
    if name == "demo" or Path(name).expanduser().exists():
        return False
    return _HUB_ID.fullmatch(name) is not None and not _looks_local(name)


def _looks_local(name: str) -> bool:
    """Whether a string that could be a hub id is meant as a path: it ends like a file, or its parent folder exists."""
    return name.endswith((".gguf", ".safetensors")) or ("/" in name and Path(name).parent.is_dir())


def _resolve_file(path: Path) -> ModelLocation:
    if path.suffix == ".gguf":
        return ModelLocation("gguf", path)
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return ModelLocation("gguf", path)
    if path.suffix in {".safetensors", ".json"}:
        raise ModelLoadError(f"{path} is one file of a model; name its folder instead: {path.parent}")
    raise ModelLoadError(f"{path} is not a GGUF file; name a GGUF file, or a folder with config.json and safetensors")


def _resolve_folder(path: Path) -> ModelLocation:
    has_config = (path / "config.json").is_file()
    if has_config and any(path.glob("*.safetensors*")):
        return ModelLocation("hf", path)
    # A projector of a multimodal model accompanies the model's own file.
    ggufs = sorted(p for p in path.glob("*.gguf") if p.is_file() and not p.name.startswith("mmproj"))
    if len(ggufs) > 1:
        listed = ", ".join(p.name for p in ggufs)
        raise ModelLoadError(f"{path} holds {len(ggufs)} GGUF files ({listed}); name the one to use: {ggufs[0]}")
    if ggufs:
        return ModelLocation("gguf", ggufs[0])
    if has_config:
        return ModelLocation("hf", path)
    raise ModelLoadError(f"{path} holds neither config.json nor a GGUF file; name a folder that contains a model")


def _resolve_hub(repo_id: str, revision: str | None, *, weights: bool) -> ModelLocation:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    local = Path(repo_id).absolute()
    # The HTTP client's own base class; which client that is depends on the version of huggingface_hub.
    transport_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_IGNORED if weights else [*_HUB_IGNORED, "*.safetensors"],
        )
    except GatedRepoError as error:
        raise ModelLoadError(
            f"the hub model {repo_id!r} is gated: accept its terms on its page, then log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(
            f"the hub model {repo_id!r} has no revision {revision!r}; correct the part of `model` after '@'"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelLoadError(
            f"{repo_id!r} is neither a hub model that you can read nor a local folder ({local} does not exist); "
            "correct `model`, or log in with `hf auth login` if it is private"
        ) from error
    except (EntryNotFoundError, OSError, transport_error) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ModelLoadError(
            f"the hub model {repo_id!r} is not in the local cache and the hub cannot be reached ({reason}); there is "
            f"no folder {local} either. Connect to the network, or download the model elsewhere and set `model` to its "
            "folder or GGUF file"
        ) from error
    path = Path(folder).absolute()
    if weights and not (path / "config.json").is_file():
        raise ModelLoadError(
            f"the hub model {repo_id!r} has no config.json; if it is a collection of GGUF files, download one of them "
            f"(`hf download {repo_id} FILE.gguf`) and set `model` to its path"
        )
    return ModelLocation("hf", path, path.name)
