"""How the commands that measure speed are told about the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launcher_kit import Run, Site

from trivet.launcher import bench_vllm
from trivet.registry import known_flat_names
from trivet.roles.base import CARDINALITY
from trivet_schemas.config import EngineConfig

SMALL = ("--input-len", 5, "--output-len", 3, "--num-iters-warmup", 0, "--num-iters", 1)

TELLER = """
    import json
    from pathlib import Path

    @hookimpl
    def trivet_engine_started(context):
        config, scheduler = context.config, context.get("scheduler")
        cache = config.selections("cache")
        told = {{
            "model": config.model,
            "seed": config.seed,
            "dtype": config.dtype,
            "max_model_len": config.max_model_len,
            "trust_remote_code": config.trust_remote_code,
            "max_num_seqs": scheduler.limits.max_num_seqs,
            "prefix_caching": cache[0].options.get("prefix_caching") if cache else None,
        }}
        Path({path!r}).write_text(json.dumps(told), encoding="utf-8")
"""


@pytest.fixture
def told(run: Run, site: Site, tmp_path: Path) -> Any:
    """A function that runs a benchmark with arguments and returns what its engine was told."""
    path = tmp_path / "told.json"
    site.plugin("teller", TELLER.format(path=str(path)))
    config = site.config(plugins={"extension": [{"use": "teller"}]})

    def ask(*arguments: Any) -> dict[str, Any]:
        replaced = [config if argument == "CONFIG" else argument for argument in arguments]
        result = run("bench", "latency", *SMALL, *replaced)
        assert result.code == 0, result.err
        return json.loads(path.read_text(encoding="utf-8"))

    return ask


def test_engine_arguments_are_flags(told: Any) -> None:
    first = told("CONFIG", "--max-num-seqs", 9, "--dtype=float32", "--max-model-len", "100")
    assert (first["max_num_seqs"], first["dtype"], first["max_model_len"]) == (9, "float32", 100)
    assert first["model"] == "demo"


def test_switches_take_no_value_and_can_be_switched_off(told: Any) -> None:
    on = told("--enable-prefix-caching", "CONFIG", "--trust-remote-code")
    assert (on["prefix_caching"], on["trust_remote_code"]) == (True, True)
    off = told("--no-enable-prefix-caching", "CONFIG")
    assert (off["prefix_caching"], off["trust_remote_code"]) == (False, False)


def test_arguments_of_vllms_that_ask_for_what_happens_anyway_change_nothing(told: Any) -> None:
    plain = told("CONFIG", "--max-num-seqs", 9)
    sizes = ("--tensor-parallel-size", 1, "-pp", 1, "--data_parallel_size=1", "--cpu-offload-gb", 0)
    kinds = (
        "--load-format",
        "auto",
        "--tokenizer-mode=auto",
        "--runner",
        "generate",
        "--logprobs-mode",
        "raw_logprobs",
    )
    switches = ("--disable-log-stats", "--enable-chunked-prefill", "--no-enable-lora", "--no-enable-expert-parallel")
    assert told(*switches, "CONFIG", *sizes, "--max-num-seqs", 9, *kinds) == plain


def test_every_argument_of_vllms_is_known_or_trivets_own() -> None:
    """None is in both lists, so that none is refused here that has a meaning of its own."""
    own = {*EngineConfig.model_fields, *known_flat_names()}
    assert not [name for name in own if bench_vllm.is_known(name)]
    assert all(bench_vllm.is_known(name) for name in (*bench_vllm._SAME, *bench_vllm._WHERE, *bench_vllm._ON))
    assert all(bench_vllm.is_known(name) for name in bench_vllm._SHORT.values())
    roles = {text.split()[0].split(".")[1] for text in bench_vllm._WHERE.values() if text.startswith("plugins.")}
    assert roles <= CARDINALITY.keys()
    flags = {word.strip(",;") for text in bench_vllm._WHERE.values() for word in text.split() if word.startswith("--")}
    assert {flag[2:].replace("-", "_") for flag in flags} <= own


def test_the_model_and_the_seed_of_the_file_are_replaced(told: Any) -> None:
    assert (told("CONFIG")["model"], told("CONFIG")["seed"]) == ("demo", 0)
    changed = told("CONFIG", "--model", "some: model", "--seed", 7)
    assert (changed["model"], changed["seed"]) == ("some: model", 7)


def test_overrides_of_the_file_are_taken_too(told: Any) -> None:
    assert told("CONFIG", "--set", "plugins.scheduler.max_num_seqs=5")["max_num_seqs"] == 5


def test_an_engine_needs_no_file(run: Run, site: Site) -> None:
    roles = ("runner", "model", "attention", "sampler", "tokenizer")
    overrides = [text for role in roles for text in ("--set", f"plugins.{role}.use=fake")]
    result = run("bench", "latency", *SMALL, "--model", "demo", *overrides)
    assert result.code == 0, result.err
    assert "Latency of demo" in result.out


def test_a_plugin_that_is_selected_may_declare_flags(run: Run, site: Site) -> None:
    site.plugin(
        "slow",
        """
        from pydantic import Field
        from trivet_schemas.options import Options, flat

        class SlowOptions(Options):
            slowness: int = Field(0, le=3, json_schema_extra=flat("slowness"))

        @hookimpl
        def trivet_providers():
            return [Provider("sampler", "slow", "trivet.testing.fake_sampler:FakeSampler", options=SlowOptions)]
        """,
    )
    refused = run("bench", "latency", *SMALL, site.config(), "--slowness", 2)
    assert refused.code == 2
    assert "unknown option '--slowness'" in refused.err
    config = site.config(plugins={"sampler": "slow"})
    accepted = run("bench", "latency", *SMALL, config, "--slowness", 2)
    assert accepted.code == 0, accepted.err
    wrong = run("bench", "latency", *SMALL, config, "--slowness", 4)
    assert wrong.code == 2
    assert "plugins.sampler.slowness" in wrong.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--model: name a model, or give a configuration file"),
        (("--modle", "demo"), "unknown option '--modle'; did you mean '--model'?"),
        (("--set", "seed=1", "--max-num-seqs", 4), "--model: name a model, or give a configuration file"),
        (("CONFIG", "b.yaml"), "CONFIG: one configuration file is taken"),
        (("CONFIG", "--max-num-sqs", 4), "unknown option '--max-num-sqs'; did you mean '--max-num-seqs'?"),
        (("CONFIG", "--num-iter", 4), "unknown option '--num-iter'; did you mean '--num-iters'?"),
        (("CONFIG", "--profile"), "--profile: an option of vLLM's that is not here"),
        (("CONFIG", "-x"), "unknown option '-x'"),
        (
            ("CONFIG", "-tp", 2),
            "--tensor-parallel-size: an option of vLLM's that is not here: one process serves the model; 1 is accepted",
        ),
        (("CONFIG", "--load-format", "dummy"), "the files of the model decide: safetensors or GGUF; auto is accepted"),
        (("CONFIG", "--hf-token"), "--hf-token: an option of vLLM's that is not here: log in with `hf auth login`"),
        (("CONFIG", "--enable-lora"), "--enable-lora: an option of vLLM's that is not here"),
        (("CONFIG", "--no-enable-chunked-prefill"), "prompts longer than --max-num-batched-tokens are always cut"),
        (("CONFIG", "--attention-backend=FLASHINFER"), "plugins.attention chooses the attention"),
        (("CONFIG", "--plugins", "x"), "unknown option '--plugins'"),
        (("CONFIG", "--max-num-seqs"), "--max-num-seqs: needs a value"),
        (("CONFIG", "--max-num-seqs", 0), "plugins.scheduler.max_num_seqs"),
        (("CONFIG", "--dtype", "int3"), "dtype"),
        (("no.yaml",), "no.yaml: no such file"),
    ],
)
@pytest.mark.parametrize("command", ["throughput", "latency", "startup"])
def test_wrong_arguments_are_named(run: Run, site: Site, command: str, arguments: tuple[Any, ...], named: str) -> None:
    config = site.config()
    result = run("bench", command, *(config if argument == "CONFIG" else argument for argument in arguments))
    assert result.code == 2
    told = " ".join(result.err.replace("│", " ").split())
    if command == "latency" or "--num-iter'" not in named:
        assert named in told
    assert "Traceback" not in result.err
