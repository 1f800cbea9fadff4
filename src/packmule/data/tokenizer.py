"""Text to token ids and back: a tokenizer from a Hugging Face folder or a GGUF file's metadata.

Saved folders load in transformers with AutoTokenizer. The construction from GGUF lives in
packmule.data.gguf_tokenizer; `tokenizers` is loaded when a tokenizer is made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from packmule.data.files import copy_files, read_json, read_text, write_json, write_text
from packmule.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TEMPLATE = "chat_template.jinja"
_COPIED = ("special_tokens_map.json", "added_tokens.json")
_ANCHOR = "\n"


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and what the files say about its special tokens.

    Attributes:
        backend: the Hugging Face `tokenizers` object; used without its own bos and eos.
        vocab: one more than the largest id it can give.
        bos, eos, pad: ids, or None where the model has none.
        add_bos: whether each document begins with `bos`.
        config: what tokenizer_config.json holds.
        source: the file or folder it came from, for messages.
        template: a file with a chat template in place of the model's own, or None.
    """

    backend: Tokenizer
    vocab: int
    bos: int | None
    eos: int
    pad: int | None
    add_bos: bool
    config: dict[str, Any] = field(repr=False)
    source: Path
    template: Path | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> TextTokenizer:
        """Read tokenizer.json and tokenizer_config.json.

        Raises:
            DataError: missing or damaged files, or no end-of-text token.
        """
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.exists():
            raise DataError(
                f"{folder} holds no tokenizer.json.",
                "save one: AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
            )
        text = read_text(path)
        try:
            backend = Tokenizer.from_str(text)
        except BaseException as error:  # tokenizers raises plain Exception; a panic in Rust is none
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise DataError(f"{path} cannot be used: {error}.", "get the tokenizer again") from None
        backend.no_padding()
        backend.no_truncation()
        config = _folder_config(folder)
        ids = {name: _special(backend, config, folder, name) for name in ("bos", "eos", "pad")}
        if ids["eos"] is None:
            raise DataError(
                f"{folder}: neither tokenizer_config.json nor config.json names an end-of-text token.",
                'add "eos_token" to tokenizer_config.json',
            )
        add_bos = config.get("add_bos_token")
        if add_bos is None:
            add_bos = ids["bos"] is not None and backend.encode("a").ids[:1] == [ids["bos"]]
        if add_bos and ids["bos"] is None:
            raise DataError(
                f"{folder}: add_bos_token is set, but there is no bos_token.", "correct tokenizer_config.json"
            )
        return cls(
            backend, _vocab(backend), ids["bos"], ids["eos"], ids["pad"], bool(add_bos), config, folder
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, with no bos or eos added. Special tokens written in the text
        become their ids, as in transformers."""
        return [
            encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def encode_continued(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode`, for texts that go on inside a document: no space is put before them.

        Each text is encoded behind a newline, whose tokens are then cut off.
        """
        anchor = self.encode([_ANCHOR])[0]
        joined = self.encode([_ANCHOR + text for text in texts])
        # a vocabulary that merges the newline with what follows leaves no seam: encode such a text alone
        return [
            ids[len(anchor) :] if ids[: len(anchor)] == anchor else self.encode([text])[0]
            for ids, text in zip(joined, texts, strict=True)
        ]

    def encode_places(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray, np.ndarray]]:
        """Like `encode`, with where each token begins and ends in its text: int64 [n] each, in characters."""
        found = []
        # a post-processor may trim white space off what a token covers; none is needed here
        processor = self.backend.post_processor
        self.backend.post_processor = None
        try:
            for encoding in self.backend.encode_batch(list(texts), add_special_tokens=False):
                places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
                found.append((encoding.ids, places[:, 0], places[:, 1]))
        finally:
            self.backend.post_processor = processor
        return found

    @cached_property
    def specials(self) -> tuple[str, ...]:
        """The special tokens of the vocabulary, by id."""
        added = self.backend.get_added_tokens_decoder()
        return tuple(token.content for _, token in sorted(added.items()) if token.special)

    @cached_property
    def chat_template(self) -> str | None:
        """The model's chat template, or None: chat_template.jinja, then tokenizer_config.json."""
        if self.template_file is not None:
            return read_text(self.template_file)
        found = self.config.get("chat_template")
        if isinstance(found, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        return found if isinstance(found, str) and found else None

    @cached_property
    def template_file(self) -> Path | None:
        """The file the chat template is in, if it has one of its own."""
        if self.template is not None:
            return self.template
        path = self.source / _TEMPLATE
        return path if self.source.is_dir() and path.exists() else None

    @cached_property
    def special_variables(self) -> dict[str, str]:
        """What chat templates may use: bos_token, eos_token, ... as text."""
        path = self.source / "special_tokens_map.json"
        named = read_json(path) if self.source.is_dir() and path.exists() else {}
        found = {}
        for name, token in {**named, **self.config}.items():
            content = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(content, str):
                found[name] = content
        for name, index in (("bos_token", self.bos), ("eos_token", self.eos), ("pad_token", self.pad)):
            if index is not None:
                found.setdefault(name, str(self.backend.id_to_token(index)))
        return found

    def with_template(self, path: Path) -> TextTokenizer:
        """This tokenizer with another chat template.

        Raises:
            DataError: the file cannot be read.
        """
        changed = replace(self, template=path)
        if not changed.chat_template:
            raise DataError(f"the chat template {path} is empty.", "name another with data.chat_template")
        return changed

    def decode(self, ids: Sequence[int] | np.ndarray, special: bool = False) -> str:
        """Text of token ids; special tokens are left out unless `special`."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=not special))

    @cached_property
    def digest(self) -> str:
        """sha256 of everything that changes ids."""
        text = json.dumps([self.backend.to_str(), self.vocab, self.bos, self.eos, self.add_bos])
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, and copy their companions.

        Raises:
            DiskError: the folder cannot be written.
        """
        write_text(folder / "tokenizer.json", self.backend.to_str())
        write_json(folder / "tokenizer_config.json", self.config)
        copy_files(self.source, folder, _COPIED)
        if self.template_file is not None:
            write_text(folder / _TEMPLATE, self.chat_template or "")
        elif folder.resolve() != self.source.resolve():
            (folder / _TEMPLATE).unlink(missing_ok=True)  # of an earlier start


def _vocab(backend: Tokenizer) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def _folder_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.exists() else {"tokenizer_class": "PreTrainedTokenizerFast"}


def _special(backend: Tokenizer, config: dict[str, Any], folder: Path, name: str) -> int | None:
    """The id of bos, eos or pad: tokenizer_config.json, special_tokens_map.json, then config.json."""
    extra = folder / "special_tokens_map.json"
    for source in (config, read_json(extra) if extra.exists() else {}):
        token = source.get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            # half of a surrogate pair, which JSON can hold, is in no vocabulary
            known = content.encode("utf-8", "ignore").decode() == content
            found = backend.token_to_id(content) if known else None
            if found is None:
                raise DataError(
                    f"{folder}: {name}_token {content!r} is not in the vocabulary.", "get the tokenizer again"
                )
            return int(found)
    path = folder / "config.json"
    value = read_json(path).get(f"{name}_token_id") if path.exists() else None
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) else None
