"""`main`: run one command line, turn every failure into a message and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from packmule.errors import PackmuleError
from packmule.spec.environment import Environment, read_environment


def main(argv: Sequence[str] | None = None, environment: Environment | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after `packmule`; those of this process when None.
        environment: what to honor instead of this process's variables.

    Returns:
        The exit code: 0 done, 1 a bug, 2 bad input, 3 does not fit, 4 disk, 5 resumable,
        130/143 stopped by a signal.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    environment = read_environment() if environment is None else environment
    debug = environment.debug or "--debug" in words
    words = [word for word in words if word != "--debug"] or ["--help"]
    try:
        return _run(words, environment)
    except PackmuleError as error:
        if debug:
            _print_traceback()
        return _report(error.cause, error.hint, error.exit_code)
    except KeyboardInterrupt:
        return 130  # the user knows
    except Exception as error:
        if debug:
            _print_traceback()
        what = str(error).strip() or "no message"
        return _report(
            f"this is a bug in packmule: {type(error).__name__}: {what}",
            "run the command again with --debug and report what it prints",
            1,
        )


def _run(words: list[str], environment: Environment) -> int:
    from typer import Abort
    from typer.main import get_command

    from packmule.cli.app import app

    command = get_command(app)
    if "--help" in words and words[0] in ("--help", *command.commands):  # type: ignore[attr-defined]
        # Asked of the command itself: parsing would load pydantic, half the time help may take.
        print(_help(command, words))
        return 0
    try:
        code = command.main(args=words, prog_name="packmule", standalone_mode=False, obj=environment)
    except Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        # Usage errors of click, which some versions of typer carry inside and others import.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "packmule"
        return _report(message(), f"see `{path} --help`", 2)
    return code if isinstance(code, int) else 0


def _help(group: Any, words: list[str]) -> str:
    from typer import Context

    context = Context(group, info_name="packmule")
    command = group.commands.get(words[0])
    if command is not None:
        context = Context(command, info_name=words[0], parent=context)
    text: str = context.command.get_help(context)
    return text


def _print_traceback() -> None:
    import traceback

    traceback.print_exc()


def _report(cause: str, hint: str, code: int) -> int:
    print(f"error: {cause}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return code
