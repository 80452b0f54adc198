"""Prompts rendered offline, as transformers renders them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fake_chat import model_folder

from forge_core.errors import UsageError
from forge_validate.families.render import Dialect, Refusal, Renderer
from forge_validate.families.template import shapes

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
PLAIN, SGLANG, _ = shapes().dialects


def made(folder: Path, template: str, config: dict[str, Any] | None = None) -> Renderer:
    model_folder(folder)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return Renderer(folder)


def length(renderer: Renderer, *contents: Any, dialect: Dialect = PLAIN, **more: Any) -> int:
    messages = [{"role": "user", "content": content} for content in contents]
    return renderer.length({"messages": messages, **more}, dialect, NOW)


def test_white_space_around_blocks_goes_as_in_transformers(tmp_path: Path) -> None:
    template = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert length(made(tmp_path, template), "abc", "de") == len("abc\nde\n")


def test_what_templates_may_use(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{{ tools | tojson }}{{ eos_token }}{{ pad_token }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    renderer = made(tmp_path, template, {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None})
    tools = [{"type": "function", "function": {"name": "f", "description": "<b>Zürich</b>"}}]
    shown = json.dumps(tools, ensure_ascii=False)
    expected = len(f"<s>30 Nov 2026{shown}</s>abc".encode())
    assert length(renderer, "abc", "de", tools=tools) == expected
    assert length(renderer, "abc", tools=tools, dialect=SGLANG) == expected + len(', "defer_loading": null')


def test_a_template_may_refuse(tmp_path: Path) -> None:
    template = (
        "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"
    )
    renderer = made(tmp_path, template)
    assert length(renderer, "abc") == 3
    with pytest.raises(Refusal, match="one message only"):
        length(renderer, "abc", "de")
    with pytest.raises(Refusal):
        made(tmp_path / "other", "{{ messages[0].content + 1 }}").length(
            {"messages": [{"role": "user", "content": "abc"}]}, PLAIN, NOW
        )
    with pytest.raises(Refusal):
        length(made(tmp_path / "unsafe", "{{ messages.append(1) }}"), "abc")


def test_parts_are_joined_unless_the_template_knows_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    joining = made(tmp_path / "text", "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert length(joining, parts) == len("ab\ncd") and length(joining, parts, dialect=SGLANG) == len("ab cd")
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    assert length(made(tmp_path / "parts", template), parts) == len("abcd")


def test_a_last_answer_is_continued_or_not(tmp_path: Path) -> None:
    renderer = made(tmp_path, "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{{ add_generation_prompt }}")
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
    body = {"messages": messages, "continue_final_message": True}
    assert renderer.length(body, PLAIN, NOW) == renderer.length(body, SGLANG, NOW) == len("userabcTruede")
    assert renderer.length({"messages": messages}, PLAIN, NOW) == len("userabcassistantdeTrue")
    assert renderer.length({"messages": messages}, SGLANG, NOW) == len("userabcuserdeTrue")


def test_templates_of_the_configuration(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    renderer = made(tmp_path, "", {"chat_template": named})
    (tmp_path / "chat_template.jinja").unlink()
    renderer = Renderer(tmp_path)
    assert length(renderer, "abc") == len("plain")
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert length(renderer, "abc", tools=tools) == len("with tools")


def test_a_folder_without_template_or_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        Renderer(tmp_path)
    with pytest.raises(UsageError, match=r"the chat template, line 1"):
        made(tmp_path, "{% for %}")
    (tmp_path / "chat_template.jinja").write_text("x")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="no tokenizer"):
        Renderer(tmp_path)
