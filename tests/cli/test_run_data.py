"""`packmule train` on the data people have: what it takes them for, shows, learns and leaves alone."""

from __future__ import annotations

import json
import math
import random
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.bench import Bench
from tests.cli.test_run_train import after, entries
from tests.cli.tiny import END, texts
from tokenizers import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(bench: Bench) -> str:
    """The bench's model with a chat template."""
    folder = bench.folder / "chat_model"
    shutil.copytree(bench.folder / "model", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder.name


def chats(seed: int, count: int) -> list[list[dict[str, str]]]:
    """Conversations of one or two turns, a few words each."""
    rng, words = random.Random(seed), texts(seed, 300)
    found = []
    for _ in range(count):
        messages = []
        for _ in range(rng.randint(1, 2)):
            for role in ("user", "assistant"):
                messages.append(
                    {"role": role, "content": " ".join(rng.choice(words).split()[: rng.randint(1, 5)])}
                )
        found.append(messages)
    return found


def short(count: int) -> list[str]:
    """A few words each, so that question and answer fit a row."""
    return [" ".join(text.split()[:5]) for text in texts(5, count)]


def marked(messages: list[dict[str, str]], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids of a conversation and which of them its answers are, one part after the other."""
    ids, trained = list[int](), list[bool]()
    text, spans = "", []
    for message in messages:
        text += f"{message['role']}: "
        begin = len(text)
        text += message["content"]
        if message["role"] == "assistant":
            text += END
            spans.append((begin, len(text)))
        text += "\n"
    encoding = tokenizer.encode(text, add_special_tokens=False)
    for index, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
        ids.append(index)
        trained.append(any(begin < stop and start < end for start, stop in spans))
    return ids, trained


def write(path: Path, records: list[Any]) -> str:
    """A .jsonl file; its name."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path.name


ONE_LINE = ("--ram", "900MB", "--threads", "1", "--max-seq-length", "64", "--model.init", "random")


def test_an_instruction_file_trains_from_one_line(bench: Bench, chat_model: str) -> None:
    records = [{"instruction": f"carry {text}", "input": "", "output": text} for text in short(39)]
    records.append({"instruction": "carry on", "input": "", "output": "the mule " * 90})
    (bench.folder / "alpaca.json").write_text(json.dumps(records, indent=2))
    words = ("train", "--model", chat_model, "--data", "alpaca.json", *ONE_LINE)
    done = bench.run(*words, "--max-steps", "2", "--output-dir", "alpaca_run").succeeded()
    [held] = [line for line in after(done.out, "data") if line.startswith("  alpaca.json")]
    assert "alpaca (instruction, input, output), 40 documents" in held and "% with loss" in held
    [long] = [line for line in after(done.out, "data") if line.startswith("  longer than a row")]
    assert "1 cut to rows, " in long
    assert long.endswith(" tokens left out (data.long_documents: split keeps them)")
    example = after(done.out, "example: alpaca.json as alpaca")
    assert [line.split("  ")[1].strip() for line in example[:3]] == ["no loss", "loss", "no loss"]
    assert example[1].strip() == f"loss      {records[0]['output']}{END}"
    assert (bench.folder / "alpaca_run" / "final" / "model.safetensors").exists()


def test_a_chat_file_trains_and_its_events_hold_the_example(bench: Bench, chat_model: str) -> None:
    conversations = chats(7, 40)
    write(bench.folder / "chat.jsonl", [{"messages": messages} for messages in conversations])
    words = ("train", "--model", chat_model, "--data", "chat.jsonl", *ONE_LINE, "--json")
    done = bench.run(*words, "--max-steps", "2", "--output-dir", "chat_run").succeeded()
    [event] = done.named("data")
    [source] = event["report"]["sources"]
    [held] = source["held"]["formats"]
    assert (held["format"], held["documents"]) == ("messages", 40)
    # the space before an answer is part of its first token
    answers = [f" {m['content']}{END}" for m in conversations[0] if m["role"] == "assistant"]
    assert [part["text"] for part in held["example"] if part["loss"]] == answers
    # the template goes with the model
    config = json.loads((bench.folder / "chat_run" / "final" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE


def test_the_loss_is_that_of_transformers_on_the_answers_alone(bench: Bench, chat_model: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    conversations = chats(8, 30)
    write(bench.folder / "judge.jsonl", [{"messages": messages} for messages in conversations])
    job = bench.job(
        "judged_apart", model__path=chat_model, data__val_path="judge.jsonl", train__max_seq_length=64,
        train__max_steps=1, train__eval_rows=None, optim__learning_rate=0, optim__warmup_steps=0,
    )  # fmt: skip
    bench.run("train", job.name).succeeded()
    folder = bench.folder / "judged_apart"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "final", dtype=torch.float64)
    tokenizer = Tokenizer.from_file(str(bench.folder / chat_model / "tokenizer.json"))
    total, count = 0.0, 0
    for messages in conversations:
        ids, trained = marked(messages, tokenizer)
        ids, trained = ids[:64], trained[:64]
        labels = [index if carries else -100 for index, carries in zip(ids, trained, strict=True)]
        if not any(trained[1:]):
            continue
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
        total, count = total + float(loss) * sum(trained[1:]), count + sum(trained[1:])
    [first, *_] = [entry for entry in entries(folder) if "eval/loss" in entry]
    assert first["eval/targets"] == count
    assert first["eval/loss"] == pytest.approx(total / count, rel=1e-5)
    # and all of the text when asked
    report = bench.run("eval", "judged_apart", "--dataset", "judge.jsonl", "--json").succeeded().json
    assert report["targets"] == count
    assert report["loss"] == first["eval/loss"]


def test_a_changed_document_leaves_the_loss_of_its_neighbors_as_it_was(
    bench: Bench, chat_model: str, seed: int
) -> None:
    """Four documents of 16 tokens in a row of 64. Of the first only its second token carries loss, and what
    follows that is changed: nothing that carries loss may move by a bit."""
    rng = np.random.default_rng(seed)
    job = bench.job("neighbors", model__path=chat_model, train__max_seq_length=64, train__max_steps=1)
    bench.run("train", job.name).succeeded()
    first, *others = rng.integers(1, 250, (4, 16)).tolist()
    labels = [-100, first[1], *[-100] * 14]
    losses = []
    for turn in range(2):
        changed = first[:2] + (rng.integers(1, 250, 14).tolist() if turn else first[2:])
        records = [{"input_ids": changed, "labels": labels}, *({"input_ids": ids} for ids in others)]
        name = write(bench.folder / f"pack{turn}.jsonl", records)
        found = bench.run("eval", "neighbors", "--dataset", name, "--json").succeeded().json
        assert (found["rows"], found["targets"]) == (1, 1 + 3 * 15)
        losses.append(found["loss"])
    assert losses[0] == losses[1]
    # a changed document that does carry loss is seen
    records = [{"input_ids": changed}, *({"input_ids": ids} for ids in others)]
    name = write(bench.folder / "pack2.jsonl", records)
    assert bench.run("eval", "neighbors", "--dataset", name, "--json").json["loss"] != losses[0]


def test_a_mix_is_trained_in_its_proportions_and_resumes_in_them(bench: Bench) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        bench.write_texts(f"mix_{name}.jsonl", texts(seed, 30))
    path = [{"path": "mix_one.jsonl", "weight": 0.75}, {"path": "mix_two.jsonl", "weight": 0.25}]
    job = bench.job("mix", data__path=path, data__val_size=0, train__max_steps=6)
    done = bench.run("train", job.name).succeeded()
    shares = [line for line in after(done.out, "data") if line.startswith("  mix: ")]
    assert "mix_one.jsonl  3 of 4 rows (75.0%)" in shares[0]
    events = bench.run("train", job.name, "--output-dir", "mix_json", "--json").succeeded()
    report = events.named("data")[0]["report"]
    first = report["train"]["groups"][0]["rows"]
    for entry in entries(bench.folder / "mix"):
        if "rows" in entry:
            assert sum(row < first for row in entry["rows"]) == 3


def test_validation_data_of_its_own_is_evaluated(bench: Bench) -> None:
    bench.write_texts("held_out.jsonl", texts(9, 12))
    job = bench.job(
        "own_set", data__val_path={"prose": "held_out.jsonl"}, train__max_steps=1, train__eval_rows=None
    )
    done = bench.run("train", job.name).succeeded()
    assert any(line.startswith("  held out") and "(prose)" in line for line in after(done.out, "data"))
    tokenizer = Tokenizer.from_file(str(bench.folder / "model" / "tokenizer.json"))
    targets = 0
    for text in texts(9, 12):
        size = len(tokenizer.encode(text).ids) + 1
        targets += sum(min(32, size - at) - 1 for at in range(0, size, 32) if min(32, size - at) > 1)
    [first, *_] = [entry for entry in entries(bench.folder / "own_set") if "eval/prose/loss" in entry]
    assert first["eval/prose/targets"] == targets
    assert math.isfinite(first["eval/prose/loss"])


def test_data_prepared_otherwise_is_said_on_resume(bench: Bench) -> None:
    job = bench.job("kept", train__max_steps=1)
    bench.run("train", job.name).succeeded()
    for words in (("--data.long-documents", "drop"), ("--data.deduplicate", "0.9")):
        assert "The data changed: an epoch" in bench.run("train", job.name, *words).succeeded().out


def test_preference_data_trains_on_its_chosen_answers_as_the_refusal_says(
    bench: Bench, chat_model: str
) -> None:
    records = [{"prompt": m[:1], "chosen": m[1:2], "rejected": m[1:2]} for m in chats(10, 30)]
    write(bench.folder / "pairs.jsonl", records)
    words = ("--model", chat_model, "--data", "pairs.jsonl", *ONE_LINE, "--max-steps", "1")
    refused = bench.run("train", *words, "--output-dir", "pairs_run").refused()
    assert "pairs.jsonl: line 1 is preference data (chosen, rejected)" in refused
    [hint] = [line for line in refused.splitlines() if line.startswith("hint: ")]
    way = hint.removeprefix("hint: to train on the chosen answers: ")
    [told] = after(bench.run("plan", *words).succeeded().out, "data")
    assert told.endswith(way)
    done = bench.run("train", *words, *shlex.split(way), "--output-dir", "pairs_run").succeeded()
    example = after(done.out, "example: pairs.jsonl as prompt-completion")
    assert example[1].split() == ["loss", *f"{records[0]['chosen'][0]['content']}{END}".split()]


@pytest.mark.parametrize(("changes", "cause"), [
    ({"path": [{"path": "text.jsonl", "weight": 1}, "text.jsonl"]}, "has no weight, and others have"),
    ({"path": [{"path": "text.jsonl", "weight": 0}]}, "greater than 0"),
    ({"path": [{"path": "text.jsonl", "wieght": 1}]}, "did you mean `weight`?"),
    ({"format": "alpacca"}, "data.format"),
    ({"deduplicate": 2}, "data.deduplicate"),
    ({"val_path": ["a/x.jsonl", "b/x.jsonl"]}, "two sets go by the name 'x'"),
])  # fmt: skip
def test_a_data_section_that_means_nothing_is_refused(
    changes: dict[str, Any], cause: str, bench: Bench
) -> None:
    job = bench.job("refused", **{f"data__{key}": value for key, value in changes.items()})
    assert cause in bench.run("plan", job.name).refused()
