"""What the documents say of commands, keys, files and tests is so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_type_hints

import pytest
from tests.cli.bench import Bench, Done

from packmule.cli.app import app
from packmule.cli.job_flags import FLAGS
from packmule.spec.job import SECTIONS, load_job
from packmule.spec.plan import Plan, Predicted
from packmule.spec.yaml_text import read_scalar

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide.md").read_text()
README = (ROOT / "README.md").read_text()
FORMATS = (ROOT / "docs" / "formats.md").read_text()
COMMANDS = {str(command.name) for command in app.registered_commands}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_job_with_data(path: Path) -> None:
    job = load_job(path.read_text(), path.name)
    job.require_data()


def test_the_readme_has_a_row_for_every_command() -> None:
    assert set(re.findall(r"^\| `packmule (\w+)` \|", README, re.MULTILINE)) == COMMANDS


def test_the_guide_has_a_row_for_every_key_and_its_default() -> None:
    rows = re.findall(
        r"^\| (`\w+\.\w+`.*?) \|(.*?)\|", GUIDE.split("### Settings")[1].split("\n## ")[0], re.MULTILINE
    )
    named: dict[str, str] = {}
    for keys, defaults in rows:
        names = re.findall(r"`([\w.]+)`", keys)
        section = names[0].split(".")[0]
        defaults = defaults.strip()
        values = defaults.split(", ") if ", " in defaults else [defaults] * len(names)
        for name, value in zip(names, values, strict=True):
            named[name if "." in name else f"{section}.{name}"] = value
    fields = {
        f"{section}.{key}": info
        for section, kind in SECTIONS.items()
        for key, info in kind.model_fields.items()
    }
    assert set(named) == set(fields) - {"logging.report_to"}
    for name, value in named.items():
        default = fields[name].default
        if value and value != "1 epoch" and not fields[name].is_required():
            assert read_scalar(value.strip("`")) == pytest.approx(default), name


@pytest.mark.parametrize("text", [README, GUIDE], ids=["README", "guide"])
def test_every_command_line_names_commands_and_flags_that_exist(text: str) -> None:
    known = {f"--{flag.name}" for flag in FLAGS}
    for command in app.registered_commands:
        function = command.callback
        assert function is not None
        for hint in get_type_hints(function, include_extras=True).values():
            for extra in getattr(hint, "__metadata__", ()):
                # In Annotated the first name stands where a default would.
                names = (getattr(extra, "default", None), *(getattr(extra, "param_decls", None) or ()))
                known |= {name for name in names if isinstance(name, str)}
    known |= {"--version", "--help", "--debug"}
    lines = re.findall(r"^ {4}(?:\.venv/bin/)?packmule (.*)$", text, re.MULTILINE)
    assert lines
    for line in lines:
        words = line.split("  ")[0].split()
        assert words[0] in COMMANDS | {"--version"}, line
        for flag in [word for word in words if word.startswith("--")]:
            assert flag in known or flag.split(".")[0].lstrip("-") in SECTIONS, line


def test_the_formats_page_names_every_key_of_a_plan_and_of_a_log(trained: Done, bench: Bench) -> None:
    plan = FORMATS.split("### plan.json")[1].split("### probe.json")[0]
    for key in (*Plan.model_fields, *Predicted.model_fields):
        assert f"`{key}`" in plan, key
    log = FORMATS.split("### log.jsonl")[1].split("### report.json")[0]
    written = (bench.folder / "run" / "log.jsonl").read_text().splitlines()
    keys = {key for line in written for key in json.loads(line)}
    assert len(keys) > 8
    for key in keys:
        assert f"`{key}`" in log, key


def test_every_test_that_the_techniques_name_exists() -> None:
    text = (ROOT / "docs" / "techniques.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) >= 7
    for path, name in named:
        source = (ROOT / path).read_text()
        assert not name or f"def {name}(" in source, (path, name)
    modules = re.findall(r"`((?:graph|plan|optim|tiers|checkpoint|data|models|spec|kernels)/\w+\.py)`", text)
    for module in modules:
        assert (ROOT / "src" / "packmule" / module).exists(), module


def test_links_between_documents_lead_somewhere() -> None:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
            if not link.startswith("http"):
                assert (path.parent / link).exists(), f"{path.name}: {link}"
