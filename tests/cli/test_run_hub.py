"""Models by their name on the hub, where Hugging Face tools have downloaded them. Nothing is downloaded."""

from __future__ import annotations

from tests.cli.bench import Bench, Done
from tests.cli.test_run_errors import says

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_downloaded_model_goes_by_its_name(trained: Done, bench: Bench) -> None:
    home = bench.folder / "hf"
    job = bench.job("by_name", model__path="mules/tiny", model__init="pretrained", train__max_steps=1)
    for command in ("plan", "train"):
        says(
            bench.run(command, job.name, HF_HOME=str(home), HF_HUB_CACHE=""), 2,
            f"model mules/tiny does not exist, and has not been downloaded either ({home}/hub).",
            "give a Hugging Face folder or a .gguf file, or download it: hf download mules/tiny",
        )  # fmt: skip
    # as huggingface_hub lays it out: names are links to contents
    place = home / "hub" / "models--mules--tiny"
    for folder in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (place / folder).mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted((bench.folder / "run" / "final").iterdir())):
        (place / "blobs" / f"{number:040x}").write_bytes(path.read_bytes())
        (place / "snapshots" / COMMIT / path.name).symlink_to(f"../../blobs/{number:040x}")
    assert "plan for" in bench.run("plan", job.name, HF_HOME=str(home), HF_HUB_CACHE="").succeeded().out
    done = bench.run("train", job.name, "--optim.lr", "0", HF_HUB_CACHE=str(home / "hub")).succeeded()
    assert "error" not in done.err
    own, theirs = (bench.folder / name / "final" / "model.safetensors" for name in ("by_name", "run"))
    assert own.read_bytes() == theirs.read_bytes()
    described = bench.run("info", "mules/tiny", "--json", HF_HOME=str(home), HF_HUB_CACHE="").succeeded()
    assert described.json["kind"] == "model"
