"""A model path (Hugging Face folder or .gguf file) -> a prepared model folder:

    config.json  tokenizer.json  tokenizer_config.json  generation_config.json  weights.json

The weights themselves stay where they are; weights.json says where.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from packmule.data.files import copy_files, disk_errors, read_json, write_json, write_text
from packmule.data.gguf import read_gguf
from packmule.data.gguf_config import gguf_config
from packmule.data.gguf_tokenizer import tokenizer_from_gguf
from packmule.data.manifest import MANIFEST, folder_manifest, gguf_manifest, random_manifest
from packmule.data.tokenizer import TextTokenizer
from packmule.errors import DataError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "added_tokens.json",
)  # fmt: skip
_CONFIG, _GENERATION = "config.json", "generation_config.json"


def read_tokenizer(model: Path, chat_template: Path | None = None) -> TextTokenizer:
    """The tokenizer of a model; nothing is written.

    Args:
        model: a .gguf file or a Hugging Face folder.
        chat_template: a file in place of the model's own template.

    Raises:
        DataError: not a model, or a damaged tokenizer.
    """
    if model.is_dir():
        tokenizer = TextTokenizer.from_folder(model)
    elif model.is_file() and model.suffix.lower() == ".gguf":
        tokenizer = tokenizer_from_gguf(model)
    else:
        raise _no_model(model)
    return tokenizer if chat_template is None else tokenizer.with_template(chat_template)


def prepare_model(
    model: Path, folder: Path, random_seed: int | None = None, chat_template: Path | None = None
) -> TextTokenizer:
    """Write the model folder and return its tokenizer.

    Args:
        model: a .gguf file or a Hugging Face folder.
        folder: where to write; made if needed.
        random_seed: draw the weights from this seed instead of reading them; the folder then
            needs no weight files.
        chat_template: a file in place of the model's own template; it goes into the folder.

    Raises:
        DataError: not a model, damaged, not supported, or the tokenizer does not fit the weights.
        DiskError: the folder cannot be written.
    """
    if model.is_dir():
        config = read_json(model / _CONFIG)
        manifest = None if random_seed is not None else folder_manifest(model)
    elif model.is_file() and model.suffix.lower() == ".gguf":
        config = gguf_config(read_gguf(model))
        manifest = None if random_seed is not None else gguf_manifest(model)
    else:
        raise _no_model(model)
    tokenizer = read_tokenizer(model, chat_template)
    if manifest is None:
        manifest = random_manifest(config, random_seed or 0)
    _check_vocabulary(model, config, tokenizer)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / _CONFIG, config)
    tokenizer.save(folder)
    generation = model / _GENERATION
    write_json(folder / _GENERATION, read_json(generation) if generation.exists() else _generation(tokenizer))
    write_text(folder / MANIFEST, manifest.to_json())
    return tokenizer


def copy_model_files(source: Path, target: Path) -> None:
    """Copy the tokenizer and generation files of a prepared model folder, for an export.

    Raises:
        DiskError: the target cannot be written.
    """
    copy_files(source, target, (*TOKENIZER_FILES, _GENERATION))


def _no_model(model: Path) -> DataError:
    what = "is neither a folder nor a .gguf file" if model.exists() else "does not exist"
    return DataError(f"model {model} {what}.", "give a .gguf file or a Hugging Face folder with config.json")


def _generation(tokenizer: TextTokenizer) -> dict[str, Any]:
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    return {key: value for key, value in ids.items() if value is not None}


def _check_vocabulary(model: Path, config: dict[str, Any], tokenizer: TextTokenizer) -> None:
    vocab = config.get("vocab_size")
    if isinstance(vocab, int) and tokenizer.vocab > vocab:
        raise DataError(
            f"{model}: the tokenizer gives ids up to {tokenizer.vocab - 1}, "
            f"but the model has {vocab} embeddings.",
            "use the tokenizer the model was trained with",
        )
