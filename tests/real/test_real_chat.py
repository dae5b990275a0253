"""Conversations through the template of Qwen2.5 0.5B Instruct, rendered as transformers does, and answered."""

from __future__ import annotations

from typing import Any

import pytest

from trivet import LLM, RequestError, SamplingParams

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
USER = {"role": "user", "content": "What is the capital of France? Answer with one word."}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {}}}]}
#: name → conversation, and how it is to be rendered
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "plain": ([USER], {}),
    "system": ([{"role": "system", "content": "Answer in German."}, USER], {}),
    "tools": ([{"role": "user", "content": "How is the weather in Paris?"}], {"tools": TOOLS}),
    "tool message": (
        [
            {"role": "user", "content": "How is the weather in Paris?"},
            {**CALL, "content": ""},
            {"role": "tool", "content": "18 °C, clear"},
        ],
        {"tools": TOOLS},
    ),
    "continued": (
        [USER, {"role": "assistant", "content": "The capital of France is"}],
        {"continue_final_message": True, "add_generation_prompt": False},
    ),
    "no generation prompt": ([USER], {"add_generation_prompt": False}),
    "own template": ([USER], {"chat_template": "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"}),
}


@pytest.fixture(scope="module")
def llm(real_model: Any) -> Any:
    """The model, with room for several conversations."""
    plugins = {"cache": {"use": "paged", "memory": "256MiB"}}
    with LLM(str(real_model("qwen05/hf")), max_model_len=1024, plugins=plugins) as made:
        yield made


@pytest.fixture(scope="module")
def original(real_model: Any) -> Any:
    """The tokenizer as transformers has it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_model("qwen05/hf"))


def _expected(original: Any, conversation: list[dict[str, Any]], options: dict[str, Any]) -> str:
    text: str = original.apply_chat_template(
        conversation, **({"add_generation_prompt": True} | options), tokenize=False
    )
    return text


@pytest.mark.parametrize("case", CASES)
def test_prompts_are_those_of_transformers(llm: LLM, original: Any, case: str) -> None:
    conversation, options = CASES[case]
    (output,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False, **options)
    assert output.prompt == _expected(original, conversation, options)
    assert output.prompt_token_ids == original.encode(output.prompt, add_special_tokens=False)


def test_parts_of_a_content_are_lines(llm: LLM, original: Any) -> None:
    half = len(USER["content"]) // 2
    parts = [{"type": "text", "text": USER["content"][:half]}, {"type": "text", "text": USER["content"][half:]}]
    params = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    joined = {"role": "user", "content": "\n".join(part["text"] for part in parts)}
    assert output.prompt == _expected(original, [joined], {})
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(RequestError, match=r"^conversation 1: messages\[0\]"):
        llm.chat([[USER], image], params, use_tqdm=False)


def test_several_conversations_are_answered_at_once(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    conversations = [[USER], CASES["continued"][0][:1], [{"role": "user", "content": "Say hello."}]]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    assert "Paris" in outputs[0].outputs[0].text
    assert outputs[1].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    (alone,) = llm.chat(conversations[2], params, use_tqdm=False)
    assert outputs[2].prompt_token_ids == alone.prompt_token_ids
    (continued,) = llm.chat(CASES["continued"][0], params, use_tqdm=False, **CASES["continued"][1])
    assert continued.outputs[0].text.startswith(" Paris")


def test_beams_contain_the_greedy_answer(llm: LLM) -> None:
    """Weights of a trained model: what is likeliest after each token is among the likeliest answers."""
    from trivet import BeamSearchParams

    prompt = llm.get_tokenizer().chat([USER])
    (greedy,) = llm.generate({"prompt": prompt}, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    (found,) = llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=4, include_stop_str_in_output=True))
    generated = [s.tokens[len(greedy.prompt_token_ids or []) :] for s in found.sequences]
    assert greedy.outputs[0].token_ids in generated
    assert [s.cum_logprob for s in found.sequences] != []
    assert all(s.text is not None and "Paris" in s.text for s in found.sequences[:1])
