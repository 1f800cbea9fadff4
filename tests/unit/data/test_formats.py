"""Formats: guessed from columns, read into what is trained on; what cannot be used is named."""

from __future__ import annotations

import json
import math
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import yaml
from tests.unit.data.chats import CHATML, conversation
from tests.unit.data.samples import SPECIALS, random_text

from packmule.data.documents import Marked, Numbered, Reading, Tally, documents, format_of
from packmule.data.gguf_tokenizer import tokenizer_from_gguf
from packmule.data.sources import Source, hash_file
from packmule.data.store import TokenStore
from packmule.data.template import ChatTemplate
from packmule.data.text import Piece
from packmule.data.tokenize import write_store
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import DataError

Read = Callable[..., list[Any]]


@pytest.fixture
def template() -> ChatTemplate:
    return ChatTemplate(CHATML, {"eos_token": "<|im_end|>"}, SPECIALS, Path("model"))


@pytest.fixture
def tokenizer(byte_level: Callable[..., Path]) -> TextTokenizer:
    return tokenizer_from_gguf(byte_level("smollm"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Source]:
    """Records as a .jsonl file."""

    def write(*records: Any, name: str = "data.jsonl") -> Source:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return hash_file(path, lambda done: None)

    return write


def read(source: Source, **reading: Any) -> list[Any]:
    return list(documents(source, Reading(**reading), Tally()))


def loss(document: Marked) -> list[str]:
    """The texts that carry loss."""
    return [document.text[begin:end] for begin, end in document.trained]


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CHATML_ASKED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize(("record", "name"), [
    ({"text": "a"}, "text"),
    ({"id": 1, "text": "a", "meta": {}}, "text"),
    ({"instruction": "a", "input": "", "output": "b"}, "alpaca"),
    ({"instruction": "a", "output": "b", "text": "both"}, "alpaca"),
    ({"conversations": SHARED}, "sharegpt"),
    ({"messages": CHAT, "prompt": "a"}, "messages"),
    ({"prompt": "a", "completion": "b"}, "prompt-completion"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
    ({"conversations": SHARED, "chosen": SHARED[1], "rejected": SHARED[1]}, "preference"),
    ({"messages": CHAT, "prompt": "a", "chosen": CHAT, "rejected": CHAT}, "preference"),
    ({"input_ids": [1], "attention_mask": [1], "labels": [1]}, "tokens"),
])  # fmt: skip
def test_the_format_is_told_by_the_columns(
    record: dict[str, Any], name: str, write: Callable[..., Source]
) -> None:
    format, columns = format_of(write(record), Reading())
    assert format.name == name
    assert columns == tuple(record)


def test_a_format_can_be_forced_and_columns_renamed(write: Callable[..., Source]) -> None:
    source = write({"text": "x", "body": "the mule", "prompt": "q", "chosen": "c", "rejected": "r"})
    assert read(source, format="text") == [Piece("x", True, True, source.bytes)]
    assert read(source, format="text", columns={"text": "body"})[0].text == "the mule"
    [found] = read(source, format="prompt-completion", columns={"completion": "chosen"})
    assert (found.text, loss(found)) == ("qc", ["c"])


def test_prompts_carry_no_loss_unless_asked(write: Callable[..., Source]) -> None:
    source = write({"prompt": "one ", "completion": "two"})
    [found] = read(source)
    assert (found.text, loss(found), found.begin, found.finish) == ("one two", ["two"], True, True)
    [found] = read(source, train_on_all=True)
    assert loss(found) == ["one two"]


def test_alpaca_is_a_conversation_where_the_model_has_a_template(
    write: Callable[..., Source], template: ChatTemplate
) -> None:
    record = {
        "instruction": "do", "input": "it", "output": "done", "system": "be", "history": [["q", "a"]],
    }  # fmt: skip
    [found] = read(write(record), template=template)
    turns = [("system", "be"), ("user", "q"), ("assistant", "a"), ("user", "do\nit"), ("assistant", "done")]
    assert found.text == "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert loss(found) == ["a<|im_end|>", "done<|im_end|>"]
    assert (found.begin, found.finish) == (False, False)


def test_alpaca_is_plain_headings_where_it_has_none(write: Callable[..., Source]) -> None:
    [found] = read(write({"instruction": "do", "input": "it", "output": "done"}))
    assert found.text == "### Instruction:\ndo\n\n### Input:\nit\n\n### Response:\ndone"
    assert loss(found) == ["done"]
    assert found.finish
    [found] = read(write({"instruction": "do", "input": "", "output": "done"}))
    assert found.text == "### Instruction:\ndo\n\n### Response:\ndone"


def test_sharegpt_messages_and_parts_are_one_conversation(
    write: Callable[..., Source], template: ChatTemplate, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        messages = conversation(rng, 3, system=True)
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        shared = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        forms = [
            {"messages": messages},
            {"conversations": shared},
            {"conversations": shared[1:], "system": messages[0]["content"]},
            {"messages": parts},
            {"prompt": messages[:-1], "completion": messages[-1:]},
        ]
        [expected, *others] = [read(write(form), template=template)[0] for form in forms]
        assert expected.text == template.text_of(messages)
        assert [other.text for other in others] == [expected.text] * 4
        assert [loss(other) for other in others[:3]] == [loss(expected)] * 3
        # of a prompt with earlier answers, only the completion is learned
        assert loss(others[3]) == [messages[-1]["content"] + "<|im_end|>"]


def test_a_cell_of_json_is_a_conversation(tmp_path: Path, template: ChatTemplate) -> None:
    cell = json.dumps(CHAT).replace('"', '""')
    path = tmp_path / "a.csv"
    path.write_text(f'id,messages\n1,"{cell}"\n')
    [found] = read(hash_file(path, lambda done: None), template=template)
    assert loss(found) == ["b<|im_end|>"]


def test_parquet_holds_conversations_and_ids(tmp_path: Path, template: ChatTemplate) -> None:
    for name, record in (("a", {"messages": CHAT}), ("b", {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]})):
        parquet.write_table(arrow.Table.from_pylist([record, record]), tmp_path / f"{name}.parquet")
    found = read(hash_file(tmp_path / "a.parquet", lambda done: None), template=template)
    assert [loss(document) for document in found] == [["b<|im_end|>"]] * 2
    [first, _] = read(hash_file(tmp_path / "b.parquet", lambda done: None))
    assert first.tokens.ids.tolist() == [1, 2, 3]
    assert first.tokens.trained.tolist() == [False, True, True]


def test_tools_are_left_out_and_counted(write: Callable[..., Source], template: ChatTemplate) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    messages = [CHAT[0], call, {"role": "tool", "content": "4"}, CHAT[1]]
    tally = Tally()
    source = write({"messages": messages, "tools": [{"name": "f"}]}, {"messages": CHAT})
    found = list(documents(source, Reading(template=template), tally))
    assert tally.tools == 1
    assert "f" not in found[0].text.replace("brief", "")
    assert "<|im_start|>tool\n4<|im_end|>" in found[0].text


def test_ids_are_taken_as_they_are(write: Callable[..., Source]) -> None:
    source = write(
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]},
        {"input_ids": [5, 6, 7], "attention_mask": [0, 1, 1], "labels": [-100, 6, 7]},
        {"input_ids": [5, 6]},
    )
    found = [document.tokens for document in read(source, vocab=9)]
    assert [tokens.ids.tolist() for tokens in found] == [[5, 6, 7, 8], [6, 7], [5, 6]]
    assert found[0].trained.tolist() == [False, True, False, True]
    assert found[1].trained.tolist() == [True, True]
    assert found[2].trained is None


@pytest.mark.parametrize(("record", "message"), [
    ({"title": "x"}, "columns of no known format .'title'."),
    ({}, "columns of no known format .none."),
    ({"title": {"text": "a"}, "b": {"text": "b"}}, "an object of 2 objects .'title', 'b'."),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference data .* kept for a later version"),
    ({"messages": "hello"}, '"messages" is not a list of messages'),
    ({"messages": ["hello"]}, 'message 1 of "messages" is not an object'),
    ({"messages": [{"content": "a"}]}, 'message 1 of "messages" has no "role"'),
    ({"messages": [CHAT[0], {"role": "assistant"}]}, 'message 2 of "messages" has no text'),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "other than text"),
    ({"messages": [{"role": "user", "content": 5}]}, 'has no text "content"'),
    ({"instruction": "a", "output": 5}, '"output" is not a string'),
    ({"instruction": "a", "output": "b", "history": [["a"]]}, "not a pair"),
    ({"prompt": "a", "completion": 3}, '"prompt" is not a list'),
    ({"input_ids": [1, 99]}, "holds 99, and the vocabulary has 20 tokens"),
    ({"input_ids": [1, -1]}, "holds -1"),
    ({"input_ids": [1, math.nan]}, r"not a list of whole numbers \(NaN\)"),
    ({"input_ids": [1, 2.0]}, r"not a list of whole numbers \(2.0\)"),
    ({"input_ids": [True]}, r"not a list of whole numbers \(True\)"),
    ({"input_ids": [1, None]}, r"not a list of whole numbers \(None\)"),
    ({"input_ids": "1 2"}, r"not a list of whole numbers \('1 2'\)"),
    ({"input_ids": [1 << 70]}, "beyond 64 bits"),
    ({"input_ids": [1, 2], "labels": [1]}, '"labels" has 1 entries, and "input_ids" 2'),
    ({"input_ids": [1, 2], "labels": [2, -100]}, "labels are not shifted"),
    ({"input_ids": [1, 2], "attention_mask": [1]}, '"attention_mask" has 1 entries'),
    ({"text": "\ud800"}, "lone surrogate"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
])  # fmt: skip
def test_a_record_that_cannot_be_used_is_named_with_its_line(
    record: dict[str, Any], message: str, write: Callable[..., Source], template: ChatTemplate
) -> None:
    good = {"title": "y"} if "title" in record or not record else None
    source = write(*([] if good is None else [record]), *([record] if good is None else []))
    with pytest.raises(DataError, match=message) as caught:
        read(source, template=template, vocab=20)
    assert f"{source.path}: line 1" in caught.value.cause and caught.value.hint


@pytest.mark.parametrize(("record", "text", "answer"), [
    ({"prompt": "q ", "chosen": "good"}, "q good", "good"),
    ({"question": "q ", "chosen": "good"}, "q good", "good"),
    ({"chosen": "Human: q Assistant: good"}, "Human: q Assistant: good", None),
    ({"instruction": "q", "input": "i", "chosen": "good"}, CHATML_ASKED.format("q\ni"), "good<|im_end|>"),
    ({"chosen": CHAT}, CHATML_ASKED.format("a"), "b<|im_end|>"),
    ({"prompt": "a", "chosen": CHAT}, CHATML_ASKED.format("a"), "b<|im_end|>"),
    ({"prompt": CHAT[:1], "chosen": CHAT[1:]}, CHATML_ASKED.format("a"), "b<|im_end|>"),
    ({"prompt": "a", "chosen": json.dumps(CHAT)}, CHATML_ASKED.format("a"), "b<|im_end|>"),
])  # fmt: skip
def test_preference_data_is_refused_with_a_way_to_train_on_the_chosen_answers(
    record: dict[str, Any],
    text: str,
    answer: str | None,
    write: Callable[..., Source],
    template: ChatTemplate,
) -> None:
    source = write({**record, "rejected": "bad"})
    with pytest.raises(DataError, match="kept for a later version") as caught:
        read(source, template=template)
    flags = shlex.split(caught.value.hint.partition(": ")[2])
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    columns = yaml.safe_load(given["--data.columns"])
    [found] = read(source, template=template, format=given["--data.format"], columns=columns)
    assert found.text.startswith(text)
    if answer is None:  # all of a text
        assert isinstance(found, Piece) and found.text == text
    else:
        assert loss(found) == [answer]


def test_chosen_answers_that_no_format_takes_are_to_be_put_behind_their_conversation(
    write: Callable[..., Source], template: ChatTemplate
) -> None:
    source = write({"conversations": SHARED[:1], "chosen": SHARED[1], "rejected": SHARED[1]})
    with pytest.raises(DataError, match="kept for a later version") as caught:
        read(source, template=template)
    assert "put each behind its conversation" in caught.value.hint


def test_a_file_of_mixed_formats_is_refused_at_the_line(
    write: Callable[..., Source], template: ChatTemplate
) -> None:
    source = write({"messages": CHAT}, {"messages": CHAT}, {"text": "a"})
    with pytest.raises(DataError, match='line 3 has no "messages" key'):
        read(source, template=template)


def test_a_conversation_without_a_template_says_how_to_name_one(write: Callable[..., Source]) -> None:
    with pytest.raises(DataError, match="no chat template") as caught:
        read(write({"messages": CHAT}))
    assert "data.chat_template" in caught.value.hint


def test_a_template_that_refuses_a_conversation_is_named_with_the_line(write: Callable[..., Source]) -> None:
    text = "{{ raise_exception('roles must alternate') if messages | length > 2 }}{{ messages[0].content }}"
    template = ChatTemplate(text, {}, SPECIALS, Path("model/chat_template.jinja"))
    source = write({"messages": CHAT[:1]}, {"messages": CHAT * 2})
    with pytest.raises(DataError, match=r"line 2: .*chat_template.jinja refuses .*roles must alternate"):
        read(source, template=template)


# The store


def test_the_store_keeps_which_tokens_carry_loss(
    tmp_path: Path, tokenizer: TextTokenizer, template: ChatTemplate, write: Callable[..., Source], seed: int
) -> None:
    rng = random.Random(seed)
    texts = [random_text(rng, rng.randrange(1, 40)) for _ in range(61)]
    chats = [conversation(rng, rng.randrange(1, 4)) for _ in range(60)]
    groups = [
        [write(*({"text": text} for text in texts), name="a.jsonl")],
        [
            write(*({"messages": chat} for chat in chats), name="b.jsonl"),
            write({"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}, name="c.jsonl"),
            write({"text": texts[0]}, name="d.jsonl"),
        ],
    ]
    reading = Reading(template=template, vocab=tokenizer.vocab)
    meta = write_store(tmp_path / "store", tokenizer, groups, lambda done: None, reading)
    store = TokenStore(tmp_path / "store")
    expected: list[tuple[list[int], list[bool]]] = []
    for text in texts:
        ids = [*tokenizer.encode([text])[0], tokenizer.eos]
        expected.append((ids, [True] * len(ids)))
    for chat in chats:
        rendered = template.render(chat)
        encoding = tokenizer.backend.encode(rendered.text, add_special_tokens=False)
        trained = [any(b < end and start < e for b, e in rendered.trained) for start, end in encoding.offsets]
        expected.append((encoding.ids, trained))
    expected.append(([1, 2, 3], [False, False, True]))
    expected.append(expected[0])
    bounds = store.document_bounds().tolist()
    assert store.meta.documents == len(expected)
    for index, (ids, trained) in enumerate(expected):
        assert store.document(index).tolist() == ids
        found = store.trained(bounds[index], len(ids))
        assert found is not None and found.tolist() == trained, index
    flat = np.array([bit for _, trained in expected for bit in trained])
    assert store.trained(0, len(flat)).tolist() == flat.tolist()  # type: ignore[union-attr]
    places = np.sort(np.random.default_rng(seed).integers(0, len(flat) + 1, 200))
    assert store.trained_before(places).tolist() == [int(flat[:at].sum()) for at in places]
    runs = [(run.entry, run.masked, run.documents) for run in meta.runs]
    assert runs == [(0, False, 61), (1, True, 61), (1, False, 1)]
    first, second = meta.entries
    assert (first.documents, second.documents) == (61, 62)
    assert [(found.format, found.documents) for found in second.formats] == [
        ("messages", 60), ("tokens", 1), ("text", 1),
    ]  # fmt: skip
    assert second.formats[0].trained == sum(sum(trained) for _, trained in expected[61:121])


def test_text_alone_needs_no_loss_bits(
    tmp_path: Path, tokenizer: TextTokenizer, write: Callable[..., Source]
) -> None:
    meta = write_store(tmp_path / "store", tokenizer, [[write({"text": "a mule"})]], lambda done: None)
    store = TokenStore(tmp_path / "store")
    assert not meta.masked
    assert store.trained(0, meta.tokens) is None
    assert not (store.folder / "loss.bin").exists()


def test_the_example_is_the_first_document_in_segments_of_loss(
    tmp_path: Path, tokenizer: TextTokenizer, template: ChatTemplate, write: Callable[..., Source]
) -> None:
    chat = [*CHAT, {"role": "user", "content": "c"}]
    reading = Reading(template=template, vocab=tokenizer.vocab)
    groups = [[write({"messages": chat}, {"messages": CHAT})]]
    meta = write_store(tmp_path / "store", tokenizer, groups, lambda done: None, reading)
    example = meta.entries[0].formats[0].example
    assert "".join(part.text for part in example) == template.text_of(chat)
    assert [part.text for part in example if part.loss] == ["b<|im_end|>"]


def test_documents_without_answers_and_empty_ones_are_counted(
    tmp_path: Path, tokenizer: TextTokenizer, template: ChatTemplate, write: Callable[..., Source]
) -> None:
    reading = Reading(template=template, vocab=tokenizer.vocab)
    empty = {"messages": [{"role": "user", "content": " "}]}
    groups = [[write({"messages": CHAT}, {"messages": CHAT[:1]}, empty, {"messages": []})]]
    meta = write_store(tmp_path / "store", tokenizer, groups, lambda done: None, reading)
    [entry] = meta.entries
    assert (entry.documents, entry.unanswered, entry.empty) == (1, 1, 2)


def test_data_in_which_nothing_carries_loss_is_refused(
    tmp_path: Path, tokenizer: TextTokenizer, template: ChatTemplate, write: Callable[..., Source]
) -> None:
    reading = Reading(template=template, vocab=tokenizer.vocab)
    groups = [[write({"messages": CHAT[:1]}, {"messages": CHAT[:1]})]]
    with pytest.raises(DataError, match="nothing in the dataset carries loss: 2 documents"):
        write_store(tmp_path / "out" / "store", tokenizer, groups, lambda done: None, reading)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_last_end_of_text_carries_loss_though_it_is_the_padding_too(
    tmp_path: Path, tokenizer: TextTokenizer, template: ChatTemplate, write: Callable[..., Source]
) -> None:
    assert tokenizer.pad == tokenizer.eos
    reading = Reading(template=template, vocab=tokenizer.vocab)
    groups = [[write({"messages": CHAT}), write({"prompt": "a", "completion": "b"}, name="b.jsonl")]]
    write_store(tmp_path / "store", tokenizer, groups, lambda done: None, reading)
    store = TokenStore(tmp_path / "store")
    bounds = store.document_bounds().tolist()
    for index in range(2):
        ids = store.document(index)
        trained = store.trained(bounds[index], len(ids))
        assert trained is not None
        assert trained[np.flatnonzero(ids == tokenizer.eos)[-1]]


def test_numbered_documents_are_whole(write: Callable[..., Source]) -> None:
    [found] = read(write({"input_ids": list(range(9))}), vocab=9)
    assert isinstance(found, Numbered)
