"""A tiny model folder and a probe record for this machine, so that commands train in seconds, unmeasured."""

from __future__ import annotations

import json
import platform
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from packmule.probe.cpu import cpu_features, cpu_name
from packmule.probe.disk import locate
from packmule.probe.roots import HOST
from packmule.spec.hardware import DiskSpeed, Hardware, MatmulPoint

WORDS = (
    "the", "mule", "carries", "grain", "over", "a", "hill", "and", "down", "to", "the", "mill", "by",
    "noon", "where", "it", "rests", "in", "shade",
)  # fmt: skip

END = "<end>"

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


def texts(seed: int, count: int = 60) -> list[str]:
    """Documents of 6 to 50 words."""
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(6, 50))) for _ in range(count)]


def write_model(folder: Path) -> None:
    """config.json of a two-layer Llama, to be drawn at random, and a byte-level tokenizer of WORDS."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(1), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id(END)}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes}))


def write_probe(cache: Path, folder: Path) -> None:
    """A record that applies to this machine, one thread and the disk of `folder`, and never expires.

    Memory and free space are always read anew, so they may say anything here.
    """
    place = locate(folder, HOST)
    points = (MatmulPoint(size=64, flops_per_second=1e9), MatmulPoint(size=1024, flops_per_second=2e10))
    record = Hardware(
        date="2999-01-01",
        host=platform.node(),
        cpu=cpu_name(HOST),
        cpu_features=cpu_features(HOST),
        threads=1,
        ram_total_bytes=1,
        ram_available_bytes=1,
        ram_limit_source="read anew",
        matmul={"float32": points, "float64": points, "bfloat16": points},
        memory_bytes_per_second=1e10,
        task_seconds=1e-4,
        disks=(
            DiskSpeed(
                path=str(place.folder),
                direct=True,
                read_bytes_per_second=1e9,
                write_bytes_per_second=5e8,
                mix_bytes_per_second=6e8,
                sync_seconds=1e-3,
                free_bytes=1,
                device=place.device,
                filesystem=place.filesystem,
            ),
        ),
        parent_baseline_bytes=60 << 20,
        child_baseline_bytes=400 << 20,
    )
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "probe.json").write_text(record.to_json())
