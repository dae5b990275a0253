"""What options of ``plugins.quantization`` come to for a model is told before anything is loaded, as by loading."""

from __future__ import annotations

from typing import Any

import pytest
from launcher_kit import Run, Site, model_config, model_folder

from trivet.testing.fakes import FakeTokenizer

COMMANDS = (("config", "check"), ("generate", "--prompt", "a", "--max-tokens", "1"))


def config(site: Site, quantization: Any) -> Any:
    folder = model_folder(site, vocab_size=FakeTokenizer().size)
    return model_config(site, folder, plugins={"quantization": quantization, "tokenizer": "fake"})


@pytest.mark.parametrize("command", COMMANDS)
def test_gguf_for_a_folder_is_refused(site: Site, run: Run, command: tuple[str, ...]) -> None:
    result = run(*command, config(site, "gguf"))
    assert (result.code, result.out) == (2, "")
    assert "plugins.quantization would change nothing: its layers are stored as bfloat16" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pattern_that_fits_no_layer_is_a_warning(
    site: Site, run: Run, command: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    result = run(*command, config(site, {"use": "int8", "exclude": ["*.o_proj", "*.o_projection"]}))
    assert result.code == 0, result.err
    (text,) = [message for message in caplog.messages if "plugins.quantization" in message]
    assert "exclude: no layer of" in text
    assert "'*.o_projection'" in text
    assert "model.layers.0.self_attn.o_proj" in text
