"""Wrong input: a message that says what to change, exit code 2, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from launcher_kit import Run, Site

from trivet.launcher import main


def _file(site: Site, text: str) -> Path:
    path = site.folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: [demo\n", "line"),
        ("model: demo\nmodel: other\n", "line 2"),
        ("modle: demo\n", "did you mean 'model'"),
        ("model: demo\nplugins:\n  schedular: static\n", "did you mean 'scheduler'"),
        ("model: demo\nplugins:\n  scheduler: contiunous\n", "did you mean 'continuous'"),
        ("model: demo\nplugins:\n  scheduler: [static, continuous]\n", "takes one provider"),
        ("model: demo\nplugins:\n  cache: {use: paged, blok_size: 4}\n", "did you mean 'block_size'"),
        ("model: demo\nplugins:\n  cache: {use: paged, block_size: 0}\n", "plugins.cache.block_size"),
        ("model: demo\ndtype: float8\n", "dtype"),
        ("", "empty"),
        ("- a\n", "keys and values"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "check"])
def test_a_wrong_file(site: Site, run: Run, text: str, named: str, command: str) -> None:
    arguments = ["config", "check"] if command == "check" else ["generate", "--prompt", "a"]
    result = run(*arguments, _file(site, text))
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert named in result.err
    assert "Traceback" not in result.err


def test_all_problems_are_listed_with_their_lines(site: Site, run: Run) -> None:
    result = run("config", "check", _file(site, "modle: demo\ndtype: float8\nseed: x\n"))
    assert result.code == 2
    for text in ("config.yaml", "line 1", "line 2", "line 3", "dtype", "seed"):
        assert text in result.err


def test_all_problems_with_plugins_are_listed(site: Site, run: Run) -> None:
    config = site.config(plugins={"scheduler": "none", "cache": {"use": "paged", "size": 1}, "executor": "nowhere"})
    result = run("generate", config, "-p", "a")
    assert result.code == 2
    assert result.err.count("  - ") == 3
    for text in ("'none'", "size", "'nowhere'"):
        assert text in result.err


def test_a_missing_file_with_a_near_name(site: Site, run: Run) -> None:
    _file(site, "model: demo\n")
    result = run("generate", site.folder / "confg.yaml")
    assert result.code == 2
    assert "no such file" in result.err
    assert "config.yaml" in result.err


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--modle", "--modle; did you mean --set model=VALUE?"),
        ("--max-num-sqs", "--max-num-sqs; did you mean --set max_num_seqs=VALUE?"),
        ("--sett", None),  # one of the command's own
        ("--unlike-anything", None),
        ("-z", None),
        ("--plugins", None),  # no value of one word
        ("--set", None),  # known, and incomplete
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat", "explain", "config check"])
def test_an_unknown_option_that_means_a_key_of_the_configuration(
    site: Site, run: Run, command: str, option: str, hint: str | None
) -> None:
    result = run(*command.split(), site.config(), option)
    assert result.code == 2
    assert (hint or option) in result.err
    assert ("did you mean" in result.err) == (hint is not None)


@pytest.mark.parametrize("override", ["plugins.scheduler", "modle=x", "plugins.cache.blok_size=4", "seed=[1", "=x"])
def test_a_wrong_override_is_quoted(site: Site, run: Run, override: str) -> None:
    result = run("generate", site.config(), "-p", "a", "--set", override)
    assert result.code == 2
    assert override in result.err


def test_an_empty_prompt_in_the_file(site: Site, run: Run) -> None:
    result = run("generate", site.config(generate={"prompts": ["a", ""]}))
    assert result.code == 2
    assert "generate.prompts.1" in result.err


def test_two_plugins_that_offer_the_same_name(site: Site, run: Run) -> None:
    site.install("acme-copy", {"copy": "trivet.testing.fakes"}, version="2.0")
    result = run("generate", site.config(), "-p", "a")
    assert result.code == 2
    assert "acme-fakes 1.0" in result.err
    assert "acme-copy 2.0" in result.err


def test_a_role_without_a_provider_says_which_packages_offer_one(site: Site, run: Run) -> None:
    # An empty distribution `trivet` in front of the real one hides the bundled plugins.
    site.install("trivet", {}, version="0.0")
    result = run("generate", site.config(plugins={"scheduler": "auto"}), "-p", "a")
    assert result.code == 2
    for text in ("scheduler", "trivet_continuous", "trivet_static", "executor", "trivet_inline"):
        assert text in result.err


_PLUGINS = {
    "a misspelt argument": (
        """
        @hookimpl
        def trivet_step_finished(evnt):
            pass
        """,
        "evnt",
    ),
    "a keyword-only argument": (
        """
        @hookimpl
        def trivet_step_finished(*, event):
            pass
        """,
        "event",
    ),
    "a phase that is not wrapped": (
        """
        @hookimpl
        def trivet_schedule(inputs):
            pass
        """,
        "trivet_schedule",
    ),
    "an unknown hook": (
        """
        @hookimpl
        def trivet_step_finnished(event):
            pass
        """,
        "trivet_step_finnished",
    ),
    "a wrapper that is no generator": (
        """
        @hookimpl(wrapper=True)
        def trivet_schedule(inputs):
            return None
        """,
        "yield",
    ),
    "a failing import": ("import no_such_module_at_all", "no_such_module_at_all"),
}


@pytest.mark.parametrize("what", _PLUGINS)
def test_a_wrong_plugin(site: Site, run: Run, what: str) -> None:
    source, named = _PLUGINS[what]
    site.plugin("wrong", source)
    config = site.config(plugins={"extension": [{"use": "wrong"}]})
    for command in (["generate", config, "-p", "a"], ["config", "check", config], ["plugins", "check", config]):
        result = run(*command)
        assert result.code == 2
        assert named in result.err
        assert "acme-wrong 1.0" in result.err


@pytest.mark.parametrize(
    "hook",
    ["trivet_schedule(inputs)", "trivet_commit(plan, result)", "trivet_sample(logits, rows)", "trivet_forward(batch)"],
)
def test_a_wrapper_that_returns_nothing_is_named(site: Site, run: Run, hook: str) -> None:
    site.plugin(
        "silent",
        f"""
        @hookimpl(wrapper=True)
        def {hook}:
            yield
        """,
    )
    result = run("generate", site.config(plugins={"extension": [{"use": "silent"}]}), "-p", "a")
    assert result.code == 2
    assert "silent" in result.err


def test_a_provider_for_another_interface_version(site: Site, run: Run) -> None:
    site.plugin(
        "future",
        """
        @hookimpl
        def trivet_providers():
            return [Provider("scheduler", "future", "trivet_static.scheduler:StaticScheduler", api=(9, 0))]
        """,
    )
    result = run("generate", site.config(plugins={"scheduler": "future"}), "-p", "a")
    assert result.code == 2
    assert "9.0" in result.err


# ---------------------------------------------------------------- models and requests


def test_a_missing_model_folder(site: Site, run: Run) -> None:
    missing = site.folder / "no" / "such" / "model"
    missing.parent.mkdir(parents=True)
    path = site.folder / "real.yaml"
    path.write_text(yaml.safe_dump({"model": str(missing), "plugins": {"tokenizer": "fake"}}), encoding="utf-8")
    for command in (["generate", path, "-p", "a"], ["config", "check", path]):
        result = run(*command)
        assert result.code == 2
        assert str(missing) in result.err


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_truncated_weights(site: Site, run: Run, kind: str) -> None:
    folder = site.folder / "model"
    folder.mkdir()
    if kind == "gguf":
        broken = folder / "model.gguf"
        broken.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(3))
    else:
        values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "vocab_size": 8}
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
        broken = folder / "model.safetensors"
        broken.write_bytes((500).to_bytes(8, "little") + b'{"w":')
    path = site.folder / "real.yaml"
    path.write_text(yaml.safe_dump({"model": str(folder), "plugins": {"tokenizer": "fake"}}), encoding="utf-8")
    result = run("generate", path, "-p", "a")
    assert result.code == 2
    assert str(broken) in result.err
    assert "Traceback" not in result.err


def test_cache_memory_for_less_than_one_request(site: Site, run: Run) -> None:
    config = site.config(max_model_len=512, plugins={"cache": {"use": "paged", "memory": "1KiB"}})
    result = run("generate", config, "-p", "a")
    assert result.code == 2
    assert "max_model_len" in result.err
    assert "plugins.cache.memory" in result.err


# ---------------------------------------------------------------- the command line itself


@pytest.mark.parametrize(
    "arguments", [["generat"], ["generate"], ["generate", "x.yaml", "--no-such"], ["plugins", "shw"]]
)
def test_wrong_usage(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert "Usage" in result.err


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_adds_the_traceback(site: Site, run: Run, place: str) -> None:
    arguments = ["generate", str(_file(site, "modle: demo\n"))]
    result = run(*(["--debug", *arguments] if place == "before" else [*arguments, "--debug"]))
    assert result.code == 2
    assert "Traceback" in result.err
    assert "error: " in result.err


def test_what_nobody_expected_keeps_its_traceback(site: Site, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("trivet_schemas.yaml_io.load_config_file", fail)
    result = run("generate", site.config(), "-p", "a")
    assert result.code == 1
    assert "Traceback" in result.err
    assert "ZeroDivisionError: a fault" in result.err


def test_an_interrupt_while_the_engine_starts(site: Site, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trivet_schemas.yaml_io.load_config_file", interrupt)
    result = run("generate", site.config(), "-p", "a")
    assert result.code == 130
    assert "Traceback" not in result.err


def test_the_version(run: Run) -> None:
    from trivet import __version__

    result = run("--version")
    assert (result.code, result.out) == (0, f"trivet {__version__}\n")


def test_the_exit_code_reaches_the_shell(site: Site) -> None:
    with site.start("config", "check", _file(site, "modle: demo\n")) as process:
        out, errors = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert "did you mean 'model'" in errors


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"], ["plugins", "--help"]])
def test_help_imports_neither_plugins_nor_what_is_slow(tmp_path: Path, arguments: list[str]) -> None:
    code = f"""
import sys
from trivet.launcher import main
assert main({arguments!r}) == 0
slow = {{"torch", "transformers", "numpy", "pluggy", "yaml", "tqdm", "jinja2"}}
print(sorted(name for name in sys.modules if name in slow or name.startswith("trivet_")), file=sys.stderr)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
    assert done.stdout


@pytest.mark.parametrize("arguments", [[], ["plugins"], ["config"]])
def test_without_a_command_the_help_is_shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = main(arguments)
    captured = capsys.readouterr()
    assert code in {0, 2}
    assert "Usage" in captured.out + captured.err


def test_the_log_tells_what_to_mend_without_a_traceback(site: Site) -> None:
    site.plugin(
        "silent",
        """
        @hookimpl(wrapper=True)
        def trivet_sample(logits, rows):
            result = yield
            return result if logits is None else None
        """,
    )
    config = site.config(plugins={"extension": [{"use": "silent"}]})
    for arguments, has_traceback in (([], False), (["--debug"], True)):
        with site.start("generate", config, "-p", "a", *arguments) as process:
            _, errors = process.communicate()
        assert process.returncode == 1
        assert "plugin 'silent' (acme-silent 1.0" in errors
        assert "return result" in errors
        assert ("Traceback" in errors) == has_traceback
