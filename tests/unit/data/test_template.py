"""Chat templates: text and loss as transformers makes them, loss where answers are, hostile ones refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.data.chats import CHATML, MARKED, PLAIN, THINKING, conversation
from tests.unit.data.samples import SPECIALS

from packmule.data.documents import Marked
from packmule.data.encode import encode
from packmule.data.gguf_tokenizer import tokenizer_from_gguf
from packmule.data.template import ChatTemplate, TemplateRefused
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import DataError


def template(text: str) -> ChatTemplate:
    variables = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return ChatTemplate(text, variables, SPECIALS, Path("model"))


def ask(content: str = "hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("text", [CHATML, MARKED, THINKING], ids=["chatml", "marked", "thinking"])
def test_text_ids_and_loss_are_those_of_transformers(
    text: str, tmp_path: Path, byte_level: Callable[..., Path], seed: int
) -> None:
    transformers = pytest.importorskip("transformers")
    rng = random.Random(seed)
    ours = tokenizer_from_gguf(byte_level("smollm"))
    ours.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(text)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = TextTokenizer.from_folder(tmp_path)
    assert ours.chat_template == text
    made = ChatTemplate(text, ours.special_variables, ours.specials, tmp_path)
    for turn in range(30):
        messages = conversation(rng, rng.randrange(1, 5), system=bool(turn % 2))
        expected = theirs.apply_chat_template(messages, tokenize=False)
        rendered = made.render(messages)
        assert rendered.text == expected
        prompt = theirs.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert made.text_of(messages[:-1], True) == prompt
        [encoded] = encode([Marked(*rendered[:2], False, False, "", 0)], ours)
        marked = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask="generation %}" in text
        )
        assert list(encoded.ids) == list(marked["input_ids"])
        if "assistant_masks" in marked:
            assert encoded.trained is not None
            assert encoded.trained.astype(int).tolist() == list(marked["assistant_masks"])


@pytest.mark.parametrize(
    "text", [CHATML, MARKED, THINKING, PLAIN], ids=["chatml", "marked", "thinking", "plain"]
)
def test_loss_lies_on_every_answer_and_its_end_and_on_nothing_else(text: str, seed: int) -> None:
    rng = random.Random(seed)
    end = "" if text == PLAIN else "<|im_end|>"
    for turn in range(40):
        messages = conversation(rng, rng.randrange(1, 6), system=bool(turn % 2))
        rendered = template(text).render(messages)
        answers = [message["content"] + end for message in messages if message["role"] == "assistant"]
        found = [rendered.text[begin:stop] for begin, stop in rendered.trained]
        if text == THINKING:
            answers[-1] = f"<think>\n\n</think>\n\n{answers[-1]}"
        if text == PLAIN:
            answers = [f"{answer}\n" for answer in answers]
        assert found == answers
        assert rendered.closed is (text != PLAIN)


def test_an_answer_that_the_template_changes_is_still_found() -> None:
    answer = "<think>\nhm\n</think>\n\nyes"
    messages = [
        *ask(),
        {"role": "assistant", "content": answer},
        *ask("?"),
        {"role": "assistant", "content": "no"},
    ]
    rendered = template(THINKING).render(messages)
    found = [rendered.text[begin:end] for begin, end in rendered.trained]
    assert found == ["yes<|im_end|>", "<think>\n\n</think>\n\nno<|im_end|>"]


def test_a_conversation_that_the_assistant_begins_is_learned_from_there() -> None:
    messages = [{"role": "assistant", "content": "hello"}, *ask(), {"role": "assistant", "content": "hello"}]
    rendered = template(CHATML).render(messages)
    assert rendered.text.startswith("<|im_start|>system\nBe brief.")
    assert [rendered.text[begin:end] for begin, end in rendered.trained] == ["hello<|im_end|>"] * 2
    assert rendered.trained[0][0] == rendered.text.index("hello")


def test_the_date_is_always_the_same() -> None:
    assert template("{{ strftime_now('%d %b %Y') }}").text_of([]) == "26 Jul 2024"


def test_json_is_not_escaped_for_html() -> None:
    value = {"b": "<é>", "a": [1, None]}
    made = template("{{ messages[0].content | tojson }}|{{ messages[0].content | tojson(indent=2) }}")
    plain, indented = made.text_of([{"role": "user", "content": value}]).split("|")
    assert plain == json.dumps(value, ensure_ascii=False)
    assert indented == json.dumps(value, ensure_ascii=False, indent=2)


@pytest.mark.parametrize(("text", "message"), [
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than"),
    ("{% set l = range(99999) | list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}", "takes"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "never ends"),
    ("{{ 'a' * 10**9 }}", "too large"),
    ("{{ [0] * 10**9 }}", "too large"),
    ("{{ 7 ** (7 ** (7 ** 7)) }}", "too large"),
    ("{{ '%999999999d' % 1 }}", "too large"),
    ("{{ 'a' | center(10 ** 10) }}", "takes more than 512 MiB"),
    ("{{ 'a'.ljust(10 ** 10) }}", "takes more than 512 MiB"),
    ("{{ '{:9999999999}'.format(1) }}", "takes more than 512 MiB|Too many decimal"),
    ("{% set ns = namespace(a='aaaaaaaa') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
     "takes more than 512 MiB"),
    ("{% set ns = namespace(a='aaaaaaaa') %}{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
     "too large"),
    ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "longer than 64 Mi characters"),
    ("{{ range(10 ** 9) }}", "[Rr]ange"),
    ("{{ messages.append(1) }}", "append"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ (messages | attr('__class__')).__base__ }}", "unsafe|undefined"),
    ("{{ raise_exception('no, thanks') }}", "no, thanks"),
    ("{{ messages[0]['nothing'].more }}", "no attribute"),
    ("{{ messages + 1 }}", "TypeError"),
    ("{% include 'a' %}", "no loader"),
    ("\ue0f0{% generation %}a{% endgeneration %}", "private characters"),
])  # fmt: skip
def test_a_hostile_template_is_refused_soon(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packmule.data.template.SECONDS", 0.3)
    made = template(text)
    with pytest.raises(TemplateRefused, match=message):
        made.render(ask())
    assert template(CHATML).render(ask()).text.endswith("hi<|im_end|>\n")


@pytest.mark.parametrize(("text", "message"), [
    ("{% for %}", "line 1 of the chat template is not valid"),
    ("\n\n{{ 'a", "line 3"),
    ("{% generation %}a", "not valid"),
    ("a" * (1 << 21), "more than any model's"),
    ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "cannot be compiled"),
])  # fmt: skip
def test_a_template_that_is_not_valid_is_named(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        template(text)
    assert "model" in caught.value.cause and caught.value.hint


def test_an_answer_that_cannot_be_placed_is_refused() -> None:
    backwards = "{% for m in messages | reverse %}{{ m.role ~ ':' ~ m.content ~ ' ' }}{% endfor %}"
    with pytest.raises(TemplateRefused, match="message 2, an answer"):
        template(backwards).render([*ask(), {"role": "assistant", "content": "yes"}])


def test_tokens_on_the_border_of_a_span_carry_loss(byte_level: Callable[..., Path], seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = tokenizer_from_gguf(byte_level("gpt-2"))
    for _ in range(60):
        messages = conversation(rng, 3)
        text = "".join(message["content"] for message in messages)
        borders = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, 4)))
        spans = tuple(zip(borders[::2], borders[1::2], strict=False))
        [encoded] = encode([Marked(text, spans, False, False, "", 0)], tokenizer)
        # which bytes a token covers follows from its own bytes; which characters, from theirs
        of_byte = [i for i, char in enumerate(text) for _ in char.encode()]
        at, expected = 0, []
        for index in encoded.ids:
            size = (
                len(tokenizer.backend.id_to_token(index)) if index >= len(SPECIALS) else len(SPECIALS[index])
            )
            covered = of_byte[at : at + size]
            expected.append(any(b < e and b <= max(covered) and min(covered) < e for b, e in spans))
            at += size
        assert at == len(of_byte)
        assert encoded.trained is not None
        assert np.array_equal(encoded.trained, expected)
