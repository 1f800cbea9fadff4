"""The functions of `import packmule`: every example of docs/api.md, and what a page does not show."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.bench import Bench

import packmule
from packmule.cli.job_flags import FLAGS
from packmule.errors import ConfigError
from packmule.spec.job import SECTIONS, load_job, read_job

ROOT = Path(__file__).parents[2]

_DOCTEST = """
import doctest, sys
failed, tried = doctest.testfile(
    sys.argv[1], module_relative=False, optionflags=doctest.ELLIPSIS
)
print(tried, "examples")
sys.exit(failed > 0)
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Model, texts and a probe record, in a folder of this module's own."""
    return Bench.make(tmp_path_factory.mktemp("api"), 21)


def script(bench: Bench, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A script file, run in the bench's folder as a user runs one."""
    path = bench.folder / "script.py"
    path.write_text(text)
    return subprocess.run(
        [sys.executable, str(path), *words],
        cwd=bench.folder,
        env=bench.variables(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_every_example_of_the_page_runs(bench: Bench) -> None:
    done = script(bench, _DOCTEST, str(ROOT / "docs" / "api.md"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-2]) > 25


def test_a_script_trains_at_its_top_level(bench: Bench) -> None:
    job = bench.job("toplevel", train__max_steps=2, data__val_size=0)
    done = script(
        bench,
        f"import packmule\nprint('started')\nrun = packmule.train({str(job)!r})\nprint('ended', run.step)\n",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == "started"
    assert done.stdout.count("started") == 1
    assert done.stdout.splitlines()[-1] == "ended 2"


@pytest.mark.parametrize("first", ["packmule.plan", "packmule.plan.search"])
def test_verbs_are_callable_and_still_packages(first: str) -> None:
    importlib.import_module(first)
    with pytest.raises(ConfigError, match=r"`model\.path` is missing"):
        packmule.plan()
    assert importlib.import_module("packmule.plan.search").search is packmule.plan.search.search


def test_signatures_are_those_of_the_functions() -> None:
    from packmule import api

    for name in ("plan", "train", "probe"):
        assert inspect.signature(getattr(packmule, name)) == inspect.signature(getattr(api, name))
    assert set(packmule.__all__) <= set(dir(packmule))
    for name in packmule.__all__:
        assert getattr(packmule, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        _ = packmule.nosuch


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_is_an_argument(flag: object) -> None:
    name = flag.name.replace("-", "_")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"the arguments: `\w+\.\w+"):
        read_job({"model": {"path": "m"}}, "the job", arguments={name: [["x"]]})


def test_arguments_mean_what_flags_mean() -> None:
    base = "model: {path: m}\ntrain: {epochs: 2}\noptim: {warmup_ratio: 0.1}\n"
    flags = [("max-steps", "7"), ("lr", "1e-3"), ("train.update", "on-fetch"), ("max-grad-norm", "null"),
             ("warmup-steps", "3"), ("ram", "2GB")]  # fmt: skip
    arguments = {"max_steps": 7, "optim": {"lr": 1e-3, "warmup_steps": 3}, "train.update": "on-fetch",
                 "max_grad_norm": None, "ram": "2GB"}  # fmt: skip
    assert load_job(base, "a", overrides=flags) == read_job(base, "b", arguments=arguments).job


def test_arguments_win_over_variables_and_are_read_without_notes() -> None:
    job, notes = read_job(
        {"model": "m"}, "the job", variables=[("PACKMULE_SEED", "5")], arguments={"lr": 0.5, "seed": 6}
    )
    assert (job.train.seed, job.optim.learning_rate, job.model.path) == (6, 0.5, "m")
    assert notes == ("the job: `model` was read as `model.path`",)


def test_a_job_is_taken_as_a_mapping_a_file_or_a_record(tmp_path: Path) -> None:
    from packmule.spec.environment import read_environment
    from packmule.train.jobs import job_of

    nothing = read_environment({})
    data = {"model": {"path": tmp_path / "m"}, "data": {"path": (tmp_path / "a", tmp_path / "b")}}
    job = job_of(data, nothing)
    assert job.data.path == (str(tmp_path / "a"), str(tmp_path / "b"))
    (tmp_path / "job.yaml").write_text(job.to_yaml())
    assert job_of(tmp_path / "job.yaml", nothing) == job
    assert job_of(job, nothing, arguments={"seed": 3}) == job.model_copy(
        update={"train": job.train.model_copy(update={"seed": 3})}
    )


def test_importing_loads_no_torch_and_hardly_anything() -> None:
    code = (
        "import sys; before = set(sys.modules); import packmule; packmule.PackmuleError; dir(packmule); "
        "print(*sorted(m for m in set(sys.modules) - before if m.startswith('packmule') or m in "
        "('torch', 'numpy', 'pydantic', 'rich', 'yaml')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["packmule", "packmule.errors"]


def test_planning_and_opening_load_no_torch(bench: Bench) -> None:
    job = bench.job("light")
    done = script(
        bench,
        f"import sys, packmule\nplan = packmule.plan({str(job)!r})\nrepr(plan), str(plan)\n"
        "print('torch' in sys.modules)\n",
    )
    assert done.stdout.splitlines()[-1] == "False", done.stdout + done.stderr


def test_sections_have_no_key_that_python_cannot_write() -> None:
    for section, kind in SECTIONS.items():
        assert section.isidentifier()
        assert all(name.isidentifier() for name in kind.model_fields)


MINE = """
from types import SimpleNamespace
import torch
from torch import nn

class Head(nn.Linear):
    def forward(self, x, batch):
        error = (super().forward(x)[:, 0] - batch[:, 0]) ** 2
        return error, {"within": error < 1}

def model(width):
    return SimpleNamespace(embed=nn.Linear(3, width), blocks=[nn.Linear(width, width)], head=Head(width, 1))

class Points:
    def __len__(self):
        return 30
    def __getitem__(self, index):
        return torch.tensor([index / 30, 1.0, -1.0])

make = lambda: model(3)
"""

SCRIPT = """
import packmule, mine
keys = dict(model={"arguments": {"width": 5}}, data_factory=mine.Points, val_factory=mine.Points,
            global_batch_size=4, max_steps=3, ram="900MB", threads=1, output_dir="mine")
def own():
    pass
for wrong in (own, mine.make):
    try:
        packmule.plan(model_factory=wrong, **keys)
    except packmule.ConfigError as error:
        print(error)
run = packmule.train(model_factory=mine.model, quiet=True, **keys)
print(run, run.evaluate().metrics)
try:
    packmule.open("mine").evaluate()
except packmule.ConfigError as error:
    print(error.hint)
assert packmule.open("mine").evaluate(imports=["mine"]) == run.evaluate()
print(run.export("mine-exported"))
"""


def test_functions_are_given_as_they_are(bench: Bench) -> None:
    (bench.folder / "mine.py").write_text(MINE)
    done = script(bench, SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "`own` is defined in the script or notebook that is being run" in done.stdout
    assert "has no name by which the training process can import it" in done.stdout
    assert "step 3 of 3" in done.stdout and "{'within': " in done.stdout
    assert "if they are yours, say so: --import mine\n" in done.stdout
    assert done.stdout.endswith("wrote mine-exported\n")
