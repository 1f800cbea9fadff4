"""Writes models/llama-1b: a Llama of 1.1 billion parameters without weights, and a tokenizer of its own.

config.json has 22 layers of width 2048, 32 heads on 4 of keys and values, 32,000 tokens; the weights are
drawn at random (`init: random` in the job). The tokenizer is a byte-level BPE of data/pydocs.jsonl, the
text that examples/make_pydocs.py writes and the model will read.
Usage: python examples/make_llama_1b.py [TARGET [TEXT]]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TARGET, TEXT = Path("models/llama-1b"), Path("data/pydocs.jsonl")
END = "</s>"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
    "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 5632,
    "vocab_size": 32000, "max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False,
}  # fmt: skip


def read_texts(path: Path) -> Iterator[str]:
    """The documents of a .jsonl file of {"text"} records."""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def train_tokenizer(path: Path) -> Tokenizer:
    """At most as many tokens as the model has; fewer where the text gives no more that occur twice."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_texts(path), trainer)
    return tokenizer


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    target, text, *_ = *map(Path, arguments), *(TARGET, TEXT)[len(arguments) :]
    if not text.exists():
        print(f"{text} does not exist.\nhint: python examples/make_pydocs.py", file=sys.stderr)
        return 2
    tokenizer = train_tokenizer(text)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    config = {**CONFIG, "eos_token_id": tokenizer.token_to_id(END)}
    (target / "config.json").write_text(json.dumps(config, indent=2))
    print(f"{target}: config.json and a tokenizer of {tokenizer.get_vocab_size():,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
