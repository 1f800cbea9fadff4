"""Formats: what the columns of a record mean. Records -> samples: texts, conversations, ids.

A format is guessed from the columns of a file's first record; then every record must have it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from packmule.errors import DataError


class Format(NamedTuple):
    """One meaning of columns.

    Attributes:
        name: as `data.format` takes it.
        required: columns that tell it.
        optional: columns it uses where they are there.
        example: a record.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    example: str


FORMATS = (
    Format("tokens", ("input_ids",), ("labels", "attention_mask"), '{"input_ids": [5, 6, 7]}'),
    Format("preference", ("chosen", "rejected"), ("prompt",), '{"chosen": "...", "rejected": "..."}'),
    Format(
        "messages", ("messages",), ("tools",), '{"messages": [{"role": "user", "content": "..."}, ...]}'
    ),
    Format(
        "sharegpt", ("conversations",), ("system", "tools"),
        '{"conversations": [{"from": "human", "value": "..."}, ...]}',
    ),
    Format("prompt-completion", ("prompt", "completion"), (), '{"prompt": "...", "completion": "..."}'),
    Format(
        "alpaca", ("instruction", "output"), ("input", "system", "history"),
        '{"instruction": "...", "output": "..."}',
    ),
    Format("text", ("text",), (), '{"text": "..."}'),
)  # fmt: skip
"""In the order in which they are tried."""

BY_NAME = {format.name: format for format in FORMATS}

_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "system": "system", "developer": "developer", "tool": "tool",
    "observation": "tool", "function_call": "assistant",
}  # fmt: skip


class Conversation(NamedTuple):
    """A chat.

    Attributes:
        messages: each with "role" and "content" (text).
        tools: definitions or calls of tools were there.
        prompt: so many messages are only the prompt; answers in them are not learned.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: bool = False
    prompt: int = 0


class Completion(NamedTuple):
    """A prompt and what is to follow it."""

    prompt: str
    completion: str


class Tokens(NamedTuple):
    """Ids: int64 [n]; which of them carry loss: bool [n], or None for all."""

    ids: np.ndarray
    trained: np.ndarray | None


Sample = str | Conversation | Completion | Tokens


def guess(columns: Collection[str]) -> Format | None:
    """The format whose columns are all there, or None."""
    return next((format for format in FORMATS if set(format.required) <= set(columns)), None)


class FormatReader:
    """Reads records of one format.

    Args:
        format: which.
        columns: our name of a column -> the file's, where they differ.
        chat: alpaca records become conversations (the model has a chat template), not plain text.
        vocab: ids must be below this.
        where: the file, for messages.
    """

    def __init__(
        self, format: Format, columns: Mapping[str, str], chat: bool, vocab: int, where: str
    ) -> None:
        self.format, self.columns, self.where = format, columns, where
        self._chat, self._vocab = chat, vocab
        self._read = {
            "tokens": self._tokens,
            "messages": self._conversation,
            "sharegpt": self._conversation,
            "preference": self._preference,
            "prompt-completion": self._prompt_completion,
            "alpaca": self._alpaca,
            "text": self._text,
        }[format.name]

    def read(self, record: Mapping[str, Any], place: str) -> Sample:
        """What one record holds.

        Raises:
            DataError: names the file, the place and the column.
        """
        self._place = place
        return self._read(record)

    # One method per format

    def _text(self, record: Mapping[str, Any]) -> Sample:
        return self._string(record, "text")

    def _prompt_completion(self, record: Mapping[str, Any]) -> Sample:
        prompt, completion = self._column(record, "prompt"), self._column(record, "completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            return Completion(self._clean("prompt", prompt), self._clean("completion", completion))
        messages = self._messages("prompt", prompt), self._messages("completion", completion)
        (asked, tools), (answered, more) = messages
        return Conversation((*asked, *answered), tools or more, len(asked))

    def _alpaca(self, record: Mapping[str, Any]) -> Sample:
        question = self._string(record, "instruction")
        answer = self._string(record, "output")
        more = self._string(record, "input", "")
        system = self._string(record, "system", "")
        turns = self._history(record)
        if self._chat:
            asked = f"{question}\n{more}" if more else question
            turns = [("system", system)] * bool(system) + turns + [("user", asked), ("assistant", answer)]
            return Conversation(tuple({"role": role, "content": text} for role, text in turns))
        parts = [system] * bool(system)
        parts += [f"### {'Instruction' if role == 'user' else 'Response'}:\n{text}" for role, text in turns]
        parts.append(f"### Instruction:\n{question}")
        parts += [f"### Input:\n{more}"] * bool(more)
        return Completion("\n\n".join([*parts, "### Response:\n"]), answer)

    def _history(self, record: Mapping[str, Any]) -> list[tuple[str, str]]:
        turns: list[tuple[str, str]] = []
        for pair in record.get(self.columns.get("history", "history")) or ():
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise self._error('"history" holds something that is not a pair of question and answer')
            asked, answered = (self._clean("history", text) for text in pair)
            turns += [("user", asked), ("assistant", answered)]
        return turns

    def _conversation(self, record: Mapping[str, Any]) -> Sample:
        name = self.format.required[0]
        messages, tools = self._messages(name, self._column(record, name))
        system = self._string(record, "system", "") if "system" in self.format.optional else ""
        if system:
            messages = ({"role": "system", "content": system}, *messages)
        return Conversation(messages, tools or bool(record.get(self.columns.get("tools", "tools"))))

    def _tokens(self, record: Mapping[str, Any]) -> Sample:
        ids = self._ids(record, "input_ids")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab:
            wrong = int(ids[(ids < 0) | (ids >= self._vocab)][0])
            raise self._error(f'"input_ids" holds {wrong}, and the vocabulary has {self._vocab} tokens')
        trained = None
        if self._has(record, "labels"):
            labels = self._ids(record, "labels")
            if len(labels) != len(ids):
                raise self._error(f'"labels" has {len(labels)} entries, and "input_ids" {len(ids)}')
            trained = labels != -100
            if not np.array_equal(labels[trained], ids[trained]):
                raise self._error(
                    '"labels" is neither -100 nor the token itself somewhere: labels are not shifted'
                )
        if self._has(record, "attention_mask"):
            kept = self._ids(record, "attention_mask") != 0
            if len(kept) != len(ids):
                raise self._error(f'"attention_mask" has {len(kept)} entries, and "input_ids" {len(ids)}')
            ids, trained = ids[kept], None if trained is None else trained[kept]
        return Tokens(ids, trained)

    def _preference(self, record: Mapping[str, Any]) -> Sample:
        raise self._error(
            "is preference data (chosen, rejected); it is recognized, and kept for a later version: "
            "no training on preferences is offered yet",
            self._chosen_alone(record),
        )

    def _chosen_alone(self, record: Mapping[str, Any]) -> str:
        """How to train on the chosen answers, by what the record has besides."""
        chosen, prompt = self._column(record, "chosen"), record.get(self.columns.get("prompt", "prompt"))
        column, others = self.columns.get("chosen", "chosen"), {}
        if _written_list(chosen):
            whole = not _written_list(prompt)  # else the prompt's messages come before the chosen ones
            name, ours = ("messages", "messages") if whole else ("prompt-completion", "completion")
        elif not isinstance(chosen, str):
            return (
                "to train on the chosen answers, put each behind its conversation: "
                f"a record of the format messages is like {BY_NAME['messages'].example}"
            )
        elif isinstance(prompt, str):
            name, ours = "prompt-completion", "completion"
        elif isinstance(record.get("question"), str):
            name, ours, others = "prompt-completion", "completion", {"prompt": "question"}
        elif isinstance(record.get("instruction"), str):
            name, ours = "alpaca", "output"
        else:
            name, ours = "text", "text"
        columns = ", ".join(f"{key}: {value}" for key, value in {**others, ours: column}.items())
        return f"to train on the chosen answers: --data.format {name} --data.columns '{{{columns}}}'"

    # Values

    def _has(self, record: Mapping[str, Any], name: str) -> bool:
        return record.get(self.columns.get(name, name)) is not None

    def _column(self, record: Mapping[str, Any], name: str) -> Any:
        key = self.columns.get(name, name)
        value = record.get(key)
        if value is None:
            keys = ", ".join(map(repr, list(record)[:8])) or "none"
            raise self._error(f'has no "{key}" key (keys: {keys})')
        return value

    def _string(self, record: Mapping[str, Any], name: str, default: str | None = None) -> str:
        if default is not None and not self._has(record, name):
            return default
        return self._clean(self.columns.get(name, name), self._column(record, name))

    def _clean(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self._error(f'"{name}" is not a string')
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise self._error("holds a lone surrogate escape", "write valid Unicode") from None
        return value

    def _ids(self, record: Mapping[str, Any], name: str) -> np.ndarray:
        value = self._column(record, name)
        if isinstance(value, (list, tuple)) and set(map(type, value)) <= {int}:
            try:
                return np.array(value, np.int64)
            except OverflowError:
                raise self._error(f'"{name}" holds a number beyond 64 bits') from None
        odd = next((item for item in value if type(item) is not int), value) if _listed(value) else value
        shown = "NaN" if isinstance(odd, float) and math.isnan(odd) else repr(odd)[:40]
        raise self._error(f'"{name}" is not a list of whole numbers ({shown})')

    def _messages(self, name: str, value: Any) -> tuple[tuple[Mapping[str, Any], ...], bool]:
        """Messages with "role" and "content", and whether tools were left out."""
        if isinstance(value, str) and value.lstrip().startswith("["):  # a cell of a CSV
            try:
                value = json.loads(value)
            except ValueError as error:
                raise self._error(f'"{name}" is not JSON: {error}') from None
        if not _listed(value):
            raise self._error(f'"{name}" is not a list of messages')
        found = [self._message(name, number, message) for number, message in enumerate(value, 1)]
        return tuple(message for message, _ in found), any(tools for _, tools in found)

    def _message(self, name: str, number: int, message: Any) -> tuple[Mapping[str, Any], bool]:
        where = f'message {number} of "{name}"'
        if not isinstance(message, Mapping):
            raise self._error(f"{where} is not an object")
        written = message.get("role", message.get("from"))
        if not isinstance(written, str) or not written:
            raise self._error(f'{where} has no "role" (or "from")')
        content = message.get("content", message.get("value"))
        tools = message.get("tool_calls") is not None
        if content is None and tools:
            content = ""
        if _listed(content):
            content = self._parts(where, content)
        if not isinstance(content, str):
            raise self._error(f'{where} has no text "content" (or "value")')
        kept = {
            k: v for k, v in message.items() if k not in ("from", "value", "tool_calls") and v is not None
        }
        role = _ROLES.get(written.lower(), written)
        tools = tools or role == "tool" or written.lower() == "function_call"
        return {**kept, "role": role, "content": self._clean(name, content)}, tools

    def _parts(self, where: str, parts: Sequence[Any]) -> str:
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
            raise self._error(f"{where} holds something other than text", "only text is trained on")
        return "".join(map(str, texts))

    def _error(self, what: str, hint: str = "") -> DataError:
        mark = "" if what.startswith(("is ", "has ", "holds ")) else ":"
        return DataError(
            f"{self.where}: {self._place}{mark} {what}.",
            hint or f"a record of the format {self.format.name} is like {self.format.example}",
        )


def _written_list(value: Any) -> bool:
    """Whether a value is a list of messages, maybe written as text in a cell of a CSV."""
    return _listed(value) or (isinstance(value, str) and value.lstrip().startswith("[{"))


def _listed(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def unknown_columns(where: str, place: str, record: Mapping[str, Any]) -> DataError:
    """The error for a record whose columns tell no format."""
    keys = ", ".join(map(repr, list(record)[:8])) or "none"
    if record and all(isinstance(value, Mapping) for value in record.values()):
        return DataError(
            f"{where}: {place} is an object of {len(record):,} objects ({keys}), which is no record.",
            'write records as an array, [{"text": "..."}, ...], or one a line',
        )
    known = "; ".join(f"{format.name}: {', '.join(format.required)}" for format in reversed(FORMATS))
    return DataError(
        f"{where}: {place} has columns of no known format ({keys}).",
        f"rename columns with data.columns, like {{text: NAME}}; formats: {known}",
    )
