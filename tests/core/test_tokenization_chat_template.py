"""Chat templates: rendered when asked, in a process of their own, within limits."""

from __future__ import annotations

import os
import re
import subprocess
import time
from typing import Any

import pytest

from helpers.vocabularies import byte_bpe
from loadkit.errors import FormatError, NotInstalledError, OptionError, PluginError
from loadkit.tokenization import chat_template, from_gguf
from loadkit.tokenization.chat_template import MAX_TEMPLATE, render_chat_template

USER = [{"role": "user", "content": "hello"}]


def test_a_tokenizer_renders_its_checkpoints_template() -> None:
    template = (
        "{{ bos_token }}{% for message in messages %}\n"
        "    <{{ message.role }}>{{ message['content'] | trim }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}<model>{% endif %}"
    )
    tokenizer = from_gguf(byte_bpe(chat_template=template))
    assert tokenizer.chat_template == template
    text = tokenizer.apply_chat_template(USER)
    assert text == "<|im_start|>    <user>hello\n<model>"  # blocks leave no lines behind
    assert tokenizer.encode(text, add_special=False)[0] == tokenizer.bos_id
    without = tokenizer.apply_chat_template(USER, add_generation_prompt=False)
    assert without == "<|im_start|>    <user>hello\n"


def test_a_template_of_the_callers_own_and_more_variables() -> None:
    text = from_gguf(byte_bpe()).apply_chat_template(
        USER,
        template="{{ tools | tojson }}{{ eos_token }}{{ nothing }}",
        variables={"tools": ["é"]},
    )
    assert text == '["é"]<|endoftext|>'


def test_without_a_template_the_error_says_what_to_do() -> None:
    with pytest.raises(OptionError, match=r"no chat template \(give the prompt as plain text"):
        from_gguf(byte_bpe()).apply_chat_template(USER)


def test_reading_a_tokenizer_runs_no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    from_gguf(byte_bpe(chat_template="{{ 1 / 0 }}")).encode("hello")


def test_what_published_templates_use_is_there() -> None:
    template = (
        "{% set ns = namespace(n=0) %}"
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{% generation %}{{ ns.n }}{% endgeneration %}|"
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') }}|"
        "{{ {'b': 1, 'a': '<é>'} | tojson(indent=1) }}|{{ messages[0].get('none', 'no') }}|"
        "{{ range(3) | list }}|{{ 'abc'[::-1] }}|{{ messages is sequence }}"
    )
    text = render_chat_template(template, {"messages": USER * 3})
    assert text == '2|[a]|{\n "b": 1,\n "a": "<é>"\n}|no|[0, 1, 2]|cba|True'
    date = render_chat_template("{{ strftime_now('%d %b %Y') }}", {})
    assert re.fullmatch(r"\d\d \w+ \d{4}", date)


def test_a_template_may_refuse_the_messages() -> None:
    with pytest.raises(OptionError, match="refuses these messages: roles must alternate"):
        render_chat_template("{{ raise_exception('roles must alternate') }}", {})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param("{% for %}", "TemplateSyntaxError", id="syntax"),
        pytest.param("{{ none.x.y }}", "UndefinedError", id="undefined"),
        pytest.param("{{ 1 / 0 }}", "ZeroDivisionError", id="zero"),
        pytest.param("{{ ''.__class__.__mro__[1] }}", "SecurityError", id="insides"),
        pytest.param(
            "{{ raise_exception.__globals__.x }}", "SecurityError|undefined", id="globals"
        ),
        pytest.param("{{ messages.append(1) }}", "SecurityError", id="changes-the-messages"),
        pytest.param("{{ self.__init__.__globals__ }}", "SecurityError|undefined", id="self"),
        pytest.param("{{ lipsum() }}{{ cycler.__init__.__globals__ }}", "undefined", id="lipsum"),
        pytest.param("{% include 'x' %}", "TypeError", id="include"),
        pytest.param("{{ range(10**9) }}", "OverflowError", id="range"),
        pytest.param("{{ '\x1b[2J' + 1 }}", "TypeError", id="steers-terminals"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_typed_error(template: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        render_chat_template(template, {"messages": USER})
    assert caught.value.code == "E_TEMPLATE"
    assert str(caught.value).isprintable()


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param(NESTED, "seconds of CPU", id="loops"),
        pytest.param(
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            "seconds of CPU",
            id="recursion-that-branches",
        ),
        pytest.param(
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion", id="recursion"
        ),
        pytest.param("{{ 'a' * 10**10 }}", "MiB", id="long-string"),
        pytest.param("{{ '%01000000000d' % 1 }}", "MiB", id="format"),
        pytest.param("{{ 'a' | center(10**9) }}", "MiB", id="filter"),
        pytest.param(
            "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
            "{% endfor %}",
            "MiB",
            id="doubling",
        ),
        pytest.param(
            "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
            "characters|MiB",
            id="output",
        ),
        pytest.param("{{ 9 ** (9 ** 9) }}", "seconds of CPU|MiB", id="power"),
    ],
)
def test_a_template_without_end_meets_a_limit(template: str, message: str) -> None:
    begin = time.monotonic()
    with pytest.raises(FormatError, match=f"over its limit of .*({message})") as caught:
        render_chat_template(template, {"messages": USER})
    assert caught.value.code == "E_LIMIT"
    assert time.monotonic() - begin < 20


def test_a_template_that_sleeps_in_the_kernel_meets_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "WALL_SECONDS", 0.5)
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 60)
    begin = time.monotonic()
    with pytest.raises(FormatError, match=r"0\.5 seconds"):
        render_chat_template(NESTED, {})
    assert time.monotonic() - begin < 10


def test_a_large_template_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(FormatError, match="more than the"):
        render_chat_template("x" * (MAX_TEMPLATE + 1), {})


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes"], ids=["set", "object", "bytes"])
def test_a_chat_is_made_of_json_values(value: Any) -> None:
    with pytest.raises(OptionError, match="must be made of JSON values"):
        render_chat_template("x", {"messages": value})


def test_a_long_chat_is_rendered_whole() -> None:
    content = "é\n" * 500_000
    messages = [{"role": "user", "content": content}]
    text = render_chat_template(
        "{{ messages[0].content }}{{ messages[0].content }}", {"messages": messages}
    )
    assert text == content * 2


def test_the_child_sees_neither_the_environment_nor_the_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}
    run = subprocess.run

    def spy(command: list[str], **options: Any) -> Any:
        seen.update(options, command=command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", spy)
    monkeypatch.setitem(os.environ, "SECRET_TOKEN", "x")
    assert render_chat_template("ok", {}) == "ok"
    assert "SECRET_TOKEN" not in seen["env"]
    assert {"-I", "-S"} <= set(seen["command"])


def test_jinja_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadkit.tokenization.libraries.find_spec", lambda name: None)
    with pytest.raises(NotInstalledError, match=r"jinja2.*pip install \"loadkit\[generate\]\""):
        render_chat_template("x", {})


def test_no_process_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(PluginError, match="no process could be started"):
        render_chat_template("x", {})


@pytest.mark.slow
@pytest.mark.parametrize("strip", [False, True])
def test_a_template_gives_what_transformers_gives(strip: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        "{%- if tools %}\n{{- '<tools>' }}\n{%- for tool in tools %}\n{{- tool | tojson }}\n"
        "{%- endfor %}\n{%- endif %}\n{% for m in messages %}\n  {% if m.role == 'user' %}\n"
        "[{{ m.content }}]\n  {% else %}\n({{ m.content | trim }})\n  {% endif %}\n{% endfor %}\n"
        "{{ eos_token }} {{ nothing }}\n"
    )
    template = template.replace("\n", "") if strip else template
    messages = [*USER, {"role": "assistant", "content": " ü\n"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    (expected,), _ = render_jinja_template(
        [messages], tools=tools, chat_template=template, eos_token="</s>"
    )
    given = {"messages": messages, "tools": tools, "eos_token": "</s>"}
    assert render_chat_template(template, given) == expected
