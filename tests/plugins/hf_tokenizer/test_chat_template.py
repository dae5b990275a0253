"""Chat templates render as transformers renders them, in a sandbox, and refuse what they must."""

from __future__ import annotations

import datetime as dt
import re

import pydantic
import pytest

from trivet.errors import ModelLoadError, RequestError
from trivet_hf_tokenizer.chat_template import ChatTemplates, read_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML_WITH_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
        {%- continue %}
    {%- endif %}
    {%- if message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n' + ({'name': call.name, 'arguments': call.arguments} | tojson) }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA_LIKE = """\
{{- bos_token }}
{% for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{% endif %}
"""

GEMMA_LIKE = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

TAGGED = """\
{% for message in messages %}
<{{ message.role }}>
  {% if message.role == 'assistant' %}
  {% generation %}
  {{ message.content }}{{ eos_token }}
  {% endgeneration %}
  {% else %}
  {{ message.content }}
  {% endif %}
{% endfor %}
"""

USER = {"role": "user", "content": "What is 2 < 3 & «é»?"}
ASSISTANT = {"role": "assistant", "content": "  True.  "}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "text": "<é>"}}}],
}
RESULT = {"role": "tool", "content": "5"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <numbers>", "parameters": {"a": {}}}}]


def render(
    template: str, messages, *, special=SPECIAL, tools=None, chat_template=None, generate=True, final=False, **variables
):
    templates = ChatTemplates("model folder", {"default": template} if template else {}, special)
    return templates.render(
        messages,
        tools=tools,
        chat_template=chat_template,
        add_generation_prompt=generate,
        continue_final_message=final,
        variables=variables,
    )


@pytest.fixture(scope="module")
def transformers_render():
    """The same through transformers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)

    def run(template: str, messages, *, tools=None, generate=True, final=False, **variables):
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=generate,
            continue_final_message=final,
            **variables,
        )

    return run


CONVERSATIONS = {
    "one": [USER],
    "system": [SYSTEM, USER, ASSISTANT, USER],
    "reply": [USER, ASSISTANT],
}


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize(
    "template", [CHATML_WITH_TOOLS, LLAMA_LIKE, GEMMA_LIKE, TAGGED], ids=["chatml", "llama", "gemma", "tagged"]
)
def test_conversations_render_as_in_transformers(transformers_render, template, conversation, generate):
    messages = CONVERSATIONS[conversation]
    expected = transformers_render(template, messages, generate=generate)
    assert render(template, messages, generate=generate) == expected
    assert "«é»" in expected


def test_tools_calls_and_results_render_as_in_transformers(transformers_render):
    messages = [SYSTEM, USER, CALL, RESULT]
    expected = transformers_render(CHATML_WITH_TOOLS, messages, tools=TOOLS)
    assert render(CHATML_WITH_TOOLS, messages, tools=TOOLS) == expected
    assert '"Adds <numbers>"' in expected
    assert '"text": "<é>"' in expected


def with_arguments(arguments, **message):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]} | message


def test_arguments_that_are_a_json_text_reach_the_template_as_an_object():
    text, given = '{"a": 2, "text": "<é>"}', CALL["tool_calls"][0]["function"]["arguments"]
    message = with_arguments(text)
    assert render(CHATML_WITH_TOOLS, [USER, message]) == render(CHATML_WITH_TOOLS, [USER, with_arguments(given)])
    assert message["tool_calls"][0]["function"]["arguments"] == text, "what the caller gave stays"
    for none in ("", None, {}, "{}"):
        assert '"arguments": {}' in render(CHATML_WITH_TOOLS, [USER, with_arguments(none, content=None)])


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (with_arguments('{"a": '), "[0].function.arguments: is no valid JSON (Expecting value: line 1 column 7"),
        (with_arguments("[1]"), "[0].function.arguments: must be an object, or its JSON text, got '[1]'"),
        (with_arguments(7), "[0].function.arguments: must be an object, or its JSON text, got 7"),
        ({"role": "assistant", "tool_calls": ["add"]}, "[0]: must be a call like {'type': 'function',"),
        ({"role": "assistant", "tool_calls": [{"function": "add"}]}, "[0]: must be a call like"),
        ({"role": "assistant", "tool_calls": "add"}, ": must be a list of calls, got 'add'"),
    ],
)
def test_calls_of_a_wrong_shape_are_refused_with_their_place(message, problem):
    with pytest.raises(RequestError, match=re.escape(f"messages[1].tool_calls{problem}")) as info:
        render(CHATML_WITH_TOOLS, [USER, message])
    assert info.value.param.startswith("messages[1].tool_calls")


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("add", "tools: must be a list of descriptions like {'type': 'function', 'function':"),
        (TOOLS[0], "tools: must be a list of descriptions"),
        (["add"], "tools[0]: must be a description like {'type': 'function'"),
        ([*TOOLS, {"type": "function", "function": "add"}], "tools[1]: must be a description like"),
        (
            [{"type": "function", "function": {"description": "x"}}],
            "tools[0].function.name: must be a string, got None",
        ),
    ],
)
def test_tools_of_a_wrong_shape_are_refused_with_their_place(tools, problem):
    with pytest.raises(RequestError, match=re.escape(problem)) as info:
        render(CHATML_WITH_TOOLS, [USER], tools=tools)
    assert info.value.param == problem.partition(":")[0]


def test_tools_may_have_a_form_of_their_own():
    assert '{"name": "add"}' in render(CHATML_WITH_TOOLS, [USER], tools=({"name": "add"},))


def test_further_variables_reach_the_template(transformers_render):
    expected = transformers_render(CHATML_WITH_TOOLS, [USER], enable_thinking=False)
    assert render(CHATML_WITH_TOOLS, [USER], enable_thinking=False) == expected
    assert expected.endswith("</think>\n\n")


def test_variables_of_the_caller_win_over_special_tokens():
    assert render("{{ bos_token }}", [USER], bos_token="<mine>") == "<mine>"


def test_absent_tools_and_documents_are_none_and_absent_special_tokens_undefined():
    template = "{{ tools is none }} {{ documents is none }} {{ pad_token is defined }}"
    assert render(template, [USER]) == "True True False"


@pytest.mark.parametrize("content", ["Sure, here", "Sure, here  ", "  Sure"])
@pytest.mark.parametrize("template", [CHATML_WITH_TOOLS, LLAMA_LIKE, GEMMA_LIKE], ids=["chatml", "llama", "gemma"])
def test_a_last_message_is_continued_as_in_transformers(transformers_render, template, content):
    messages = [USER, {"role": "assistant", "content": content}]
    expected = transformers_render(template, messages, generate=False, final=True)
    assert render(template, messages, generate=False, final=True) == expected
    assert expected.rstrip().endswith(content.strip())
    assert messages[1]["content"] == content


def test_a_last_message_in_parts_is_continued():
    messages = [USER, {"role": "assistant", "content": [{"type": "text", "text": "Sure"}, {"type": "image"}]}]
    rendered = render(GEMMA_LIKE, messages, generate=False, final=True)
    assert rendered.endswith("<start_of_turn>model\nSure")
    assert messages[1]["content"][0]["text"] == "Sure"


def test_parts_reach_a_template_that_reads_them_and_are_joined_for_one_that_does_not(transformers_render):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    assert render(GEMMA_LIKE, messages) == transformers_render(GEMMA_LIKE, messages)
    assert "onetwo" in render(GEMMA_LIKE, messages)
    assert "user\none\ntwo<|im_end|>" in render(CHATML_WITH_TOOLS, messages)
    through_variable = "{% set c = messages[0]['content'] %}{% for part in c %}[{{ part.text }}]{% endfor %}"
    assert render(through_variable, messages) == "[one][two]"
    assert render("{{ messages[0].content[1].text }}", messages) == "two"


def test_messages_may_be_pydantic_models():
    class Message(pydantic.BaseModel):
        role: str
        content: str | None = None
        tool_calls: list[dict[str, str]] | None = None

    assert "user\nhi<|im_end|>" in render(CHATML_WITH_TOOLS, [Message(role="user", content="hi")])


def test_time_is_available():
    rendered = render("{{ strftime_now('%Y-%m-%d') }}", [USER])
    assert abs(dt.date.fromisoformat(rendered) - dt.datetime.now().astimezone().date()).days <= 1


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% set x = cycler.__init__.__globals__ %}{{ x.os }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template):
    with pytest.raises(RequestError, match=r"SecurityError|UndefinedError"):
        render(template, [USER])


def test_objects_do_not_reach_a_template():
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]\.image: must be JSON data, got object"):
        render(GEMMA_LIKE, [{"role": "user", "content": [{"type": "image", "image": object()}]}])


# ------------------------------------------------------------------------------------------------------ refusals


def test_what_a_template_refuses_is_said_in_its_words():
    with pytest.raises(RequestError, match="refuses the messages: Conversation roles must alternate") as info:
        render(GEMMA_LIKE, [USER, USER])
    assert info.value.param == "messages"


def test_without_a_template_the_remedy_is_named():
    with pytest.raises(RequestError, match=r"model folder has no chat template.*`chat_template`"):
        render("", [USER])


def test_a_template_may_come_with_the_request():
    assert render("", [USER], chat_template="{{ messages[0].role }}!") == "user!"


def test_an_unknown_name_lists_the_templates_there_are():
    with pytest.raises(
        RequestError, match=r"'rag' is neither a Jinja text nor a template of model folder \(it has: default\)"
    ):
        render(LLAMA_LIKE, [USER], chat_template="rag")


def test_several_templates_without_a_default_must_be_named():
    templates = ChatTemplates("model folder", {"rag": "r", "plain": "p"}, {})
    arguments = {"tools": None, "add_generation_prompt": True, "continue_final_message": False, "variables": {}}
    assert not templates
    assert templates.render([USER], chat_template="rag", **arguments) == "r"
    with pytest.raises(RequestError, match="name one with `chat_template`: plain, rag"):
        templates.render([USER], chat_template=None, **arguments)


@pytest.mark.parametrize(
    ("messages", "message", "param"),
    [
        ([], "at least one message", "messages"),
        ("hi", "must be a list of messages, got str", "messages"),
        (USER, "must be a list of messages, got dict", "messages"),
        ([USER, "hi"], r"messages\[1\]: must be a mapping", "messages[1]"),
        ([{"content": "hi"}], r"messages\[0\]\.role: must be a word", "messages[0].role"),
        ([{"role": 7, "content": "hi"}], r"messages\[0\]\.role: must be a word like 'user', got 7", "messages[0].role"),
        ([{"role": "user"}], r"content: is missing, and .* has no tool_calls; give a text", "messages[0].content"),
        ([USER, {"role": "assistant", "content": None}], r"messages\[1\]\.content: is missing", "messages[1].content"),
        ([{"role": "user", "content": 3}], "must be a text or a list of parts, got 3", "messages[0].content"),
        ([{"role": "user", "content": {"text": "x"}}], "must be a text or a list of parts", "messages[0].content"),
        ([{"role": "user", "content": ["a", 4]}], "must be a part like .*, got 4", "messages[0].content[1]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            r"messages\[0\]\.content\[0\]: the chat template takes only text, got a part of type 'image_url'",
            "messages[0].content[0]",
        ),
    ],
)
def test_messages_of_a_wrong_shape_are_refused_with_their_place(messages, message, param):
    with pytest.raises(RequestError, match=message) as info:
        render(CHATML_WITH_TOOLS, messages)
    assert info.value.param == param


def test_a_template_that_fails_is_an_error_of_the_request():
    with pytest.raises(RequestError, match=r"chat template of model folder failed on these messages: TypeError"):
        render("{{ messages[0].content + 3 }}", [USER])


def test_a_template_with_wrong_syntax_names_the_line():
    with pytest.raises(RequestError, match=r"the given chat template is no valid Jinja template: line 2"):
        render("", [USER], chat_template="{{ 1 }}\n{% if %}")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, CALL], r"messages\[1\]\.content: continue_final_message needs a text"),
        (
            [USER, {"role": "assistant", "content": [{"type": "image"}]}],
            r"messages\[1\]\.content: continue_final_message",
        ),
    ],
)
def test_a_message_without_text_cannot_be_continued(messages, message):
    with pytest.raises(RequestError, match=message):
        render(GEMMA_LIKE, messages, generate=False, final=True)


def test_a_message_that_the_template_drops_cannot_be_continued():
    with pytest.raises(RequestError, match="the chat template changes the last message"):
        render("{{ messages[0].content }}", [USER, ASSISTANT], generate=False, final=True)


def test_a_prompt_ends_in_one_way():
    with pytest.raises(RequestError, match="set add_generation_prompt to false"):
        render(LLAMA_LIKE, [USER, ASSISTANT], generate=True, final=True)


# ------------------------------------------------------------------------------------------------- configuration


def test_a_template_is_read_from_a_file_a_text_or_a_name(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("file: {{ messages[0].content }}", encoding="utf-8")
    assert read_template(str(path), {}) == "file: {{ messages[0].content }}"
    assert read_template("{{ 1 }}", {}) == "{{ 1 }}"
    assert read_template("rag", {"rag": "text"}) == "text"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=rf"chat_template: the file {re.escape(str(tmp_path))}.*does not exist"):
        read_template(str(tmp_path / "none.jinja"), {"default": ""})


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "bad.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelLoadError, match=r"chat_template: cannot read .*bad\.jinja"):
        read_template(str(tmp_path / "bad.jinja"), {})


def test_a_configured_template_with_wrong_syntax_stops_the_start():
    with pytest.raises(ModelLoadError, match="chat_template: .* no valid Jinja template: line 1"):
        read_template("{% for %}", {})
