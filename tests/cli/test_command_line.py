"""The command line as a user meets it: messages, exit codes, help, and what it loads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from packmule import __version__
from packmule.cli import entry, main
from packmule.cli.job_flags import FLAGS, split_words
from packmule.errors import ConfigError, DiskError, DoesNotFit, Interrupted, PackmuleError, RunFailed
from packmule.spec.environment import read_environment
from packmule.spec.job import load_job

COMMANDS = ("probe", "plan", "train", "eval", "generate", "export", "verify", "info")


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str, **variables: str) -> Result:
        code = main(words, read_environment(variables))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("model: {path: m}\ntrain: {max_steps: 3}\n")
    return path


def refused(result: Result) -> str:
    """Standard error of a refusal: a cause, then a hint, no traceback, nothing on standard output."""
    assert result.code == 2
    assert result.out == ""
    first, *rest = result.err.rstrip("\n").split("\n")
    assert first.startswith("error: ")
    assert any(line.startswith("hint: ") for line in rest)
    assert "Traceback" not in result.err
    return result.err


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"packmule {__version__}\n", "")


def test_without_words_the_help_is_printed(run: Run) -> None:
    assert run().out == run("--help").out
    assert run().code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.code == 0
    assert f"Usage: packmule {command} " in result.out
    assert result.out.count(f"packmule {command} ") >= 2
    assert command in run("--help").out


def test_help_names_every_flag_of_the_job(run: Run) -> None:
    for command in ("plan", "train"):
        text = run(command, "--help").out
        for flag in FLAGS:
            assert f"--{flag.name}" in text


def test_every_flag_reaches_a_field_of_the_job() -> None:
    for flag in FLAGS:
        with pytest.raises(ConfigError, match=rf"the command line \(--{flag.name}\): `\w+\.\w+"):
            load_job("model: {path: m}", "job.yaml", overrides=[(flag.name, "[[x]]")])


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--max-stesp", "3"), "`train.max_steps`, section `train`"),
        (("--optim.lerning_rate", "3"), "did you mean `optim.learning_rate`?"),
        (("--train.lr", "3"), "it belongs in section `optim`: write `optim.learning_rate`"),
        (("--lr", "fast"), "the command line (--learning-rate): `optim.learning_rate` = 'fast'"),
        (("--ram", "2 XB"), "`hardware.ram` = '2 XB'"),
        (("--max-steps", "3", "--epochs", "1"), "both decide how long"),
        (("-x",), "unknown option `-x`"),
        (("second.yaml",), "two job files"),
        (("--max-steps",), "requires an argument"),
    ],
)
def test_a_wrong_flag_is_refused_with_a_way_out(
    run: Run, job: Path, command: str, words: tuple[str, ...], named: str
) -> None:
    assert named in refused(run(command, str(job), *words))


def test_a_wrong_key_in_the_file_is_refused_with_its_name(run: Run, job: Path) -> None:
    job.write_text("model: {path: m}\ntrain: {learning-rate: 1e-4}\n")
    message = refused(run("train", str(job)))
    assert f"error: {job}: unknown key `train.learning-rate`.\n" in message
    assert "write `optim.learning_rate`" in message


def test_files_that_cannot_be_read_are_named(run: Run, job: Path, tmp_path: Path) -> None:
    missing = refused(run("plan", str(tmp_path / "jbo.yaml")))
    assert f"{tmp_path}/jbo.yaml does not exist" in missing
    assert "there is job.yaml" in missing
    assert "is a folder" in refused(run("plan", str(tmp_path)))
    (tmp_path / "bad.yaml").write_text("model: [m\n")
    assert "bad.yaml, line 2" in refused(run("plan", str(tmp_path / "bad.yaml")))
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9")
    assert "not UTF-8" in refused(run("plan", str(tmp_path / "latin.yaml")))


def test_training_without_data_is_refused(run: Run, job: Path) -> None:
    assert "`data.path` is missing" in refused(run("train", str(job)))


def test_a_wrong_variable_is_named(run: Run, job: Path) -> None:
    assert "PACKMULE_RAM: `hardware.ram` = 'lots'" in refused(run("plan", str(job), PACKMULE_RAM="lots"))


@pytest.mark.parametrize(
    "words",
    [("nosuch",), ("nosuch", "--help"), ("probe", "--threads", "x"), ("generate", "out"), ("verify",)],
)
def test_usage_errors_are_errors_like_the_others(run: Run, words: tuple[str, ...]) -> None:
    assert "--help`" in refused(run(*words))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PackmuleError("it broke.", "mend it"), 2),
        (DoesNotFit("it broke.", "mend it"), 3),
        (DiskError("it broke.", "mend it"), 4),
        (RunFailed("it broke.", "mend it"), 5),
        (Interrupted(2, "it broke.", "mend it"), 130),
        (Interrupted(15, "it broke.", "mend it"), 143),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("it broke."), 1),
    ],
)
def test_every_failure_has_its_exit_code_and_no_traceback_unless_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(entry, "_run", fail)
    result = run("train")
    assert result.code == code
    assert result.err.startswith("error: ") or code == 130
    assert "Traceback" not in result.err
    if isinstance(error, PackmuleError):
        assert result.err == "error: it broke.\nhint: mend it\n"
    if not isinstance(error, KeyboardInterrupt):
        assert "Traceback" in run("train", "--debug").err
        assert "Traceback" in run("train", PACKMULE_DEBUG="1").err


def test_free_words_become_the_file_and_the_overrides() -> None:
    words = [
        "--optim.lr",
        "1e-4",
        "run.yaml",
        "--a=b=c",
        "--optim.min-lr",
        "-1e-4",
        "--bf16",
        "--x",
        "[1, 2]",
    ]
    path, pairs = split_words(words)
    assert path == "run.yaml"
    assert pairs == (
        ("optim.lr", "1e-4"),
        ("a", "b=c"),
        ("optim.min-lr", "-1e-4"),
        ("bf16", "true"),
        ("x", "[1, 2]"),
    )


def test_flags_reach_the_job_in_whatever_order(run: Run, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from packmule.cli import common

    seen = {}
    original = common.read_job

    def spy(words: object, environment: object) -> object:
        seen["job"] = original(words, environment)  # type: ignore[arg-type]
        raise RunFailed("seen.")

    monkeypatch.setattr("packmule.cli.train.read_job", spy)
    free = ("--optim.weight-decay=0.5", "--train.seed", "7")
    for words in (
        (*free, str(job), "--lr", "1e-3", "--max_steps", "9", "--dataset", "a b", "--dataset", "c's"),
        ("--dataset", "a b", "--lr", "1e-3", str(job), "--max-steps", "9", "--dataset", "c's", *free),
    ):
        assert run("train", *words).code == 5
        found = seen["job"]
        assert (found.optim.learning_rate, found.optim.weight_decay) == (1e-3, 0.5)
        assert (found.train.seed, found.train.max_steps) == (7, 9)
        assert found.data.path == ("a b", "c's")


def test_control_c_inside_a_command_is_130(run: Run, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("packmule.cli.train.read_job", interrupt)
    result = run("train", str(job))
    assert result.code == 130
    assert "Traceback" not in result.err


def test_names_of_other_tools_are_noted_on_standard_error(run: Run, job: Path) -> None:
    job.write_text("model_name_or_path: m\nmax_steps: 3\n")
    result = run("train", str(job))
    assert f"note: {job}: `model_name_or_path` was read as `model.path`\n" in result.err


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout


LOADED = "import json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import packmule", {"torch", "numpy", "pydantic", "yaml", "rich", "typer", "transformers"}),
        ("main(['--help'])", {"torch", "numpy", "pydantic", "yaml", "rich", "transformers"}),
        ("main(['plan', '--help'])", {"torch", "numpy", "pydantic", "yaml", "rich", "transformers"}),
        ("main(['plan', 'nosuch.yaml'])", {"torch", "transformers"}),
        ("import packmule.spec.job, packmule.spec.plan", {"torch", "transformers"}),
        ("import packmule.train.launch", {"torch", "transformers"}),
        ("import packmule.train.commands", {"torch", "transformers"}),
        ("import packmule.train.child", {"torch", "transformers"}),
    ],
)
def test_what_needs_no_torch_loads_none(program: str, absent: set[str]) -> None:
    program = program if program.startswith("import") else f"from packmule.cli import main; {program}"
    loaded = set(json.loads(python(f"{program}\n{LOADED}").splitlines()[-1]))
    assert not loaded & absent
