"""``trivet generate`` for prompts of the command line and of the file."""

from __future__ import annotations

import pytest
from launcher_kit import Run, Site, continuation

_GREEDY = {"sampling": {"temperature": 0, "max_tokens": 8}}


def test_the_prompts_of_the_file_run_in_their_order_each_before_its_text(site: Site, run: Run) -> None:
    prompts = ["One two", "three", "a longer prompt than these"]
    result = run("generate", site.config(generate={"prompts": prompts, **_GREEDY}))
    assert result.code == 0
    assert result.out == "\n".join(f"> {prompt}\n{continuation(prompt, 8)}\n" for prompt in prompts)
    assert result.err == ""


def test_a_single_prompt_prints_its_text_alone(site: Site, run: Run) -> None:
    result = run("generate", site.config(generate=_GREEDY), "--prompt", "Hello")
    assert (result.code, result.out) == (0, continuation("Hello", 8) + "\n")


def test_prompts_of_the_command_line_replace_those_of_the_file(site: Site, run: Run) -> None:
    config = site.config(generate={"prompts": ["not this"], **_GREEDY})
    result = run("generate", config, "-p", "first", "-p", "second", "--json")
    assert [record["prompt"] for record in result.records] == ["first", "second"]


def test_json_has_one_object_per_prompt(site: Site, run: Run) -> None:
    result = run("generate", site.config(generate={"prompts": ["ab", "c"], **_GREEDY}), "--json")
    first, second = result.records
    assert first["id"] == "0"
    assert first["prompt"] == "ab"
    assert first["outputs"][0]["text"] == continuation("ab", 8)
    assert first["outputs"][0]["finish_reason"] == "length"
    assert len(first["outputs"][0]["token_ids"]) == 8
    assert first["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "cached_tokens": 0}
    assert second["outputs"][0]["text"] == continuation("c", 8)


@pytest.mark.parametrize("option", [("--max-tokens", "3"), ("--set", "generate.sampling.max_tokens=3")])
def test_sampling_parameters_can_be_overridden(site: Site, run: Run, option: tuple[str, str]) -> None:
    result = run("generate", site.config(generate=_GREEDY), "-p", "Hello", *option)
    assert result.out == continuation("Hello", 3) + "\n"


def test_a_wrong_sampling_parameter_of_the_command_line_is_refused(site: Site, run: Run) -> None:
    result = run("generate", site.config(), "-p", "Hello", "--temperature", "7")
    assert result.code == 2
    assert "temperature" in result.err
    assert "7" in result.err


def test_prompts_go_through_the_chat_template_if_the_file_says_so(site: Site, run: Run) -> None:
    result = run("generate", site.config(generate={"chat": True, **_GREEDY}), "-p", "Hello")
    assert result.out == continuation("user: Hello.assistant: ", 8) + "\n"


def test_several_outputs_per_prompt_are_numbered(site: Site, run: Run) -> None:
    sampling = {"n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 5}
    result = run("generate", site.config(generate={"sampling": sampling}), "-p", "Hello")
    lines = result.out.splitlines()
    assert [line[:3] for line in lines] == ["[1]", "[2]", "[3]"]
    assert len({line[3:] for line in lines}) == 3
    assert {len(line) for line in lines} == {8}


def test_stop_strings_end_the_text(site: Site, run: Run) -> None:
    whole = continuation("Hello", 40)
    stop = whole[10:13]
    sampling = {"temperature": 0, "max_tokens": 40, "stop": [stop]}
    result = run("generate", site.config(generate={"sampling": sampling}), "-p", "Hello", "--json")
    (output,) = result.records[0]["outputs"]
    assert output["text"] == whole[: whole.index(stop)]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", stop)


def test_another_scheduler_and_cache_give_the_same_text(site: Site, run: Run) -> None:
    config = site.config(generate={"prompts": ["a", "b b b b b", "c" * 40], **_GREEDY})
    plain = run("generate", config)
    swapped = run("generate", config, "--set", "plugins.scheduler.use=static", "--set", "plugins.cache.use=contiguous")
    assert (swapped.code, swapped.out) == (0, plain.out)


def test_dropped_options_are_noted(site: Site, run: Run) -> None:
    config = site.config(plugins={"scheduler": {"use": "continuous", "max_num_batched_tokens": 64}}, generate=_GREEDY)
    result = run("generate", config, "-p", "Hello", "--set", "plugins.scheduler.use=static")
    assert result.code == 0
    assert "note: plugins.scheduler" in result.err
    assert "max_num_batched_tokens" in result.err


def test_without_a_prompt_it_says_where_to_put_one(site: Site, run: Run) -> None:
    result = run("generate", site.config())
    assert result.code == 2
    assert "--prompt" in result.err
    assert "generate.prompts" in result.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--prompt", "a", "--input", "x.jsonl"), "--prompt"),
        (("--prompt", "a", "--output", "y.jsonl"), "--output"),
        (("--prompt", "a", "--resume"), "--resume"),
    ],
)
def test_options_that_do_not_go_together(site: Site, run: Run, arguments: tuple[str, ...], named: str) -> None:
    result = run("generate", site.config(), *arguments)
    assert result.code == 2
    assert named in result.err


def test_a_refused_prompt_is_named_and_nothing_runs(site: Site, run: Run) -> None:
    result = run("generate", site.config(model={"max_model_len": 32}), "-p", "short", "-p", "x" * 40)
    assert result.code == 2
    assert result.out == ""
    assert "prompt 2 of 2" in result.err
    assert "40 tokens" in result.err
    assert "32" in result.err


@pytest.mark.parametrize("prompt", ["", "\udcff"])
def test_a_prompt_that_is_no_text_is_refused(site: Site, run: Run, prompt: str) -> None:
    result = run("generate", site.config(), "--prompt", prompt)
    assert result.code == 2
    assert "prompt" in result.err
    assert "Traceback" not in result.err


def test_a_request_that_fails_as_it_runs_is_named_and_the_others_are_printed(site: Site, run: Run) -> None:
    plugins = site.spoil("b")
    config = site.config(plugins=plugins, generate={"prompts": ["a", "b", "c"], **_GREEDY})
    result = run("generate", config)
    assert result.code == 1
    assert continuation("a", 8) in result.out
    assert continuation("c", 8) in result.out
    assert "prompt 2 of 3: " in result.err
    assert "NaN" in result.err


def test_a_step_that_hangs_ends_requests_with_the_reason_and_leaves_a_dump(site: Site, run: Run) -> None:
    """The second step hangs until the watchdog has written down what it saw."""
    dump = site.folder / "dump.json"
    site.plugin(
        "sleeper",
        f"""
        import pathlib, time

        steps = []

        @hookimpl(wrapper=True)
        def trivet_forward(batch):
            steps.append(batch)
            end = time.monotonic() + 30
            while len(steps) == 2 and not pathlib.Path({str(dump)!r}).exists() and time.monotonic() < end:
                time.sleep(0.01)
            return (yield)
        """,
    )
    watchdog = {"seconds": 0.5, "dump": str(dump)}
    config = site.config(plugins={"extension": [{"use": "sleeper"}]}, watchdog=watchdog)
    result = run("generate", config, "--prompt", "abc", "--json")
    assert result.code == 1
    (record,) = result.records
    assert "a worker hangs" in str(record)
    told = run("explain", dump)
    assert told.code == 0
    assert "a step has not returned for 0.5 s; a worker hangs" in told.out
    assert "time.sleep" in told.out or "trivet_forward" in told.out
