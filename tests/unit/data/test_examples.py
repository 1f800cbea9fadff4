"""What examples/ writes is data that is read as it should be."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from packmule.data.documents import Reading, format_of
from packmule.data.records import read_records
from packmule.data.sources import hash_file

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_chitchat_becomes_messages_of_user_and_assistant(tmp_path: Path) -> None:
    said = [[("a", "hi"), ("a", "you there?")], [("b", "yes")], [("a", "good"), ("a", "so")], [("b", "né")]]
    lonely = [[("c", "anybody?")]]
    raw = {
        name: {"messages": [[{"sender": who, "text": text} for who, text in turn] for turn in turns]}
        for name, turns in (("one", said), ("two", lonely), ("three", []))
    }
    source, target = tmp_path / "dataset.json", tmp_path / "data" / "chat.jsonl"
    source.write_text(json.dumps(raw))
    assert runpy.run_path(str(EXAMPLES / "make_chitchat.py"))["main"]([str(target), str(source)]) == 0
    made = hash_file(target, lambda done: None)
    assert format_of(made, Reading())[0].name == "messages"
    [record] = read_records(made)
    texts = [("user", "hi you there?"), ("assistant", "yes"), ("user", "good so"), ("assistant", "né")]
    assert [(message["role"], message["content"]) for message in record.value["messages"]] == texts
