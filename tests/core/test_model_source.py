"""Which files a model's name stands for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

import trivet.demo
from trivet.errors import ModelLoadError
from trivet.model_source import ModelLocation, find_model, hub_config, read_json, resolve_model


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A hub that records what is asked for; tests put a folder or an exception into ``answer``."""
    calls: dict[str, Any] = {"asked": [], "answer": LocalEntryNotFoundError("no connection")}

    def snapshot_download(repo_id: str, *, revision: str | None, **options: Any) -> str:
        calls["asked"].append((repo_id, revision))
        calls["options"] = options
        if isinstance(calls["answer"], Exception):
            raise calls["answer"]
        return str(calls["answer"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return calls


def make_folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_bytes(b"{}")
    return path


def test_folder_with_config_and_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors", "extra.gguf")
    assert resolve_model(str(folder)) == ModelLocation("hf", folder)
    assert resolve_model("m") == ModelLocation("hf", folder)
    assert resolve_model(Path("m")) == ModelLocation("hf", folder)


def test_folder_with_one_gguf_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "model.gguf", "mmproj-model.gguf", "README.md")
    assert resolve_model(folder) == ModelLocation("gguf", folder / "model.gguf")


def test_folder_with_config_but_only_gguf_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.gguf")
    assert resolve_model(folder) == ModelLocation("gguf", folder / "model.gguf")


def test_folder_with_several_gguf_files_lists_them(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "q4.gguf", "q8.gguf")
    with pytest.raises(ModelLoadError, match=r"2 GGUF files \(q4\.gguf, q8\.gguf\); name the one to use"):
        resolve_model(folder)


def test_folder_without_a_model(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "README.md")
    with pytest.raises(ModelLoadError, match=r"neither config\.json nor a GGUF file"):
        resolve_model(folder)


def test_gguf_file_is_known_by_its_name_or_its_first_bytes(tmp_path: Path) -> None:
    by_name, by_content = tmp_path / "model.gguf", tmp_path / "blob"
    by_name.write_bytes(b"")
    by_content.write_bytes(b"GGUF...")
    assert resolve_model(by_name) == ModelLocation("gguf", by_name)
    assert resolve_model(by_content) == ModelLocation("gguf", by_content)


def test_one_file_of_a_folder_points_to_the_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors")
    with pytest.raises(ModelLoadError, match="name its folder instead") as caught:
        resolve_model(folder / "model.safetensors")
    assert str(folder) in str(caught.value)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        resolve_model("./notes.txt")


@pytest.mark.parametrize("name", ["./models/qwen", "/no/such/folder", "a/b/c", "../up", "~/nowhere-at-all"])
def test_missing_path_is_named_absolutely(name: str, tmp_path: Path, hub: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="missing model folder") as caught:
        resolve_model(name)
    assert str(Path(name).expanduser().absolute()) in str(caught.value)
    assert hub["asked"] == []


def test_missing_gguf_file(tmp_path: Path, hub: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="missing GGUF file") as caught:
        resolve_model("qwen/model.gguf")
    assert str(tmp_path / "qwen" / "model.gguf") in str(caught.value)
    assert hub["asked"] == []


def test_missing_folder_beside_existing_ones_is_not_taken_for_a_hub_id(tmp_path: Path, hub: dict[str, Any]) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelLoadError, match="missing model folder"):
        resolve_model("models/qwen")
    assert hub["asked"] == []


def test_a_missing_path_object_is_never_a_hub_id(hub: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="missing model folder"):
        resolve_model(Path("Qwen/Qwen3-0.6B"))
    assert hub["asked"] == []


def test_empty_name() -> None:
    with pytest.raises(ModelLoadError, match="the name of the model is empty"):
        resolve_model("")


def test_hub_model_carries_the_commit(tmp_path: Path, hub: dict[str, Any]) -> None:
    hub["answer"] = make_folder(tmp_path / "cache" / "0123abc", "config.json", "model.safetensors")
    assert resolve_model("Qwen/Qwen3-0.6B") == ModelLocation("hf", hub["answer"], "0123abc")
    assert hub["asked"] == [("Qwen/Qwen3-0.6B", None)]
    assert not any(pattern.endswith((".bin", ".gguf")) for pattern in hub["options"]["allow_patterns"])


def test_hub_revision(tmp_path: Path, hub: dict[str, Any]) -> None:
    hub["answer"] = make_folder(tmp_path / "cache" / "0123abc", "config.json", "model.safetensors")
    resolve_model("Qwen/Qwen3-0.6B@refs/pr/3")
    assert hub["asked"] == [("Qwen/Qwen3-0.6B", "refs/pr/3")]


@pytest.mark.parametrize("failure", [LocalEntryNotFoundError("no connection"), OSError("disk full")])
def test_unreachable_hub_says_so_and_what_to_do(failure: Exception, tmp_path: Path, hub: dict[str, Any]) -> None:
    hub["answer"] = failure
    with pytest.raises(ModelLoadError, match="the hub cannot be reached") as caught:
        resolve_model("Qwen/Qwen3-0.6B")
    message = str(caught.value)
    assert str(failure) in message
    assert str(tmp_path / "Qwen" / "Qwen3-0.6B") in message
    assert "set `model` to its folder or GGUF file" in message


def test_broken_connection_while_downloading(hub: dict[str, Any]) -> None:
    transport_error = HfHubHTTPError.__bases__[0]
    hub["answer"] = transport_error("connection reset")
    with pytest.raises(ModelLoadError, match="connection reset"):
        resolve_model("Qwen/Qwen3-0.6B")


def test_hub_collection_of_gguf_files(tmp_path: Path, hub: dict[str, Any]) -> None:
    hub["answer"] = make_folder(tmp_path / "cache" / "0123abc", "README.md")
    with pytest.raises(ModelLoadError, match=r"hf download Qwen/Some-GGUF FILE\.gguf"):
        resolve_model("Qwen/Some-GGUF")


def test_hub_tokenizer_without_weights(tmp_path: Path, hub: dict[str, Any]) -> None:
    hub["answer"] = make_folder(tmp_path / "snapshots" / "abc", "tokenizer.json")
    assert resolve_model("owner/tokenizer", weights=False) == ModelLocation("hf", hub["answer"], "abc")
    assert "*.safetensors" in hub["options"]["ignore_patterns"]
    hub["answer"] = make_folder(tmp_path / "snapshots" / "def", "config.json")
    resolve_model("owner/name")
    assert "*.safetensors" not in hub["options"]["ignore_patterns"]


def test_what_is_on_this_machine_is_found_without_asking_the_hub(
    tmp_path: Path, hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "model", "config.json", "model.safetensors")
    assert find_model(str(folder), "main") == ModelLocation("hf", folder)
    cached = make_folder(tmp_path / "hub" / "0123abc", "config.json")

    def try_to_load(repository: str, filename: str, revision: str | None) -> str | None:
        asked.append((repository, revision))
        return str(cached / filename) if repository == "Qwen/Qwen3-0.6B" else None

    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", try_to_load)
    assert find_model("Qwen/Qwen3-0.6B") == ModelLocation("hf", cached)
    assert find_model("Qwen/Qwen3-0.6B", "v2") == ModelLocation("hf", cached, "v2")
    assert find_model("Qwen/Qwen3-0.6B@v1", "v2") == ModelLocation("hf", cached, "v1")
    assert find_model("nobody/has-this") is None
    assert [revision for _, revision in asked] == [None, "v2", "v1", None]
    with pytest.raises(ModelLoadError, match="missing GGUF file"):
        find_model(str(tmp_path / "other.gguf"))
    assert hub["asked"] == []


TRANSPORT_ERROR: Any = HfHubHTTPError.__bases__[0]


class Session:
    """The hub's HTTP client, with one file."""

    def __init__(self, answer: str | Exception) -> None:
        self.answer = answer
        self.asked: list[tuple[str, dict[str, str]]] = []

    def get(self, url: str, *, headers: dict[str, str], timeout: float) -> Any:
        assert timeout < 60
        self.asked.append((url, headers))
        if isinstance(self.answer, Exception):
            raise self.answer
        text = self.answer
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: json.loads(text))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"model_type": "llama"}', {"model_type": "llama"}),
        ("[1]", None),
        ("<html>", None),
        (TRANSPORT_ERROR("404 or no connection"), None),
        (OfflineModeIsEnabled("offline"), None),
    ],
)
def test_a_configuration_is_fetched_alone(
    answer: Any, expected: Any, hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(answer)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "secret")
    assert hub_config("owner/name@refs/pr/3", "main") == expected
    assert hub_config("owner/name", "v1") == expected
    paths = [url.split("owner/name/")[1] for url, _ in session.asked]
    assert paths == ["resolve/refs%2Fpr%2F3/config.json", "resolve/v1/config.json"], "asked once each"
    assert all(headers == {"authorization": "Bearer secret"} for _, headers in session.asked)
    assert hub["asked"] == []


def test_nothing_is_fetched_offline_or_under_an_impossible_name() -> None:
    assert hub_config("owner/name") is None
    assert hub_config("owner/na..me") is None


def test_a_json_file_is_an_object_or_an_array_as_wanted(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": "\u00e9"}', encoding="utf-8")
    assert read_json(path) == {"a": "\u00e9"}
    with pytest.raises(ModelLoadError, match=r"config\.json must hold a JSON array, got dict"):
        read_json(path, list)
    path.write_text("[1]", encoding="utf-8")
    assert read_json(path, list) == [1]
    with pytest.raises(ModelLoadError, match=r"config\.json must hold a JSON object, got list"):
        read_json(path)


@pytest.mark.parametrize("content", [b'{"a":', b"\xff\xfe", b"", b"[" * 200_000], ids=range(4))
def test_a_damaged_json_file_is_named_with_the_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read as JSON \(.+\).*: download the file again"):
        read_json(tmp_path / "config.json")


def test_a_json_file_that_cannot_be_opened_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot read .*modules\.json: No such file or directory; check"):
        read_json(tmp_path / "modules.json")
    with pytest.raises(ModelLoadError, match=r"cannot read .*: Is a directory; check the file and its permissions"):
        read_json(tmp_path)


def test_demo_comes_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trivet.demo, "demo_model_path", lambda: tmp_path / "demo.gguf")
    assert resolve_model("demo") == ModelLocation("gguf", tmp_path / "demo.gguf")


def test_a_local_model_needs_no_hub_client() -> None:
    code = (
        "import sys, trivet.model_source as source\n"
        "try:\n    source.resolve_model('./missing')\nexcept source.ModelLoadError:\n    pass\n"
        "sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
