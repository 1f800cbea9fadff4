"""Chat templates: a conversation -> its text, and which of its characters the assistant wrote.

Templates come with models and are not trusted: they run in Jinja's immutable sandbox with bounds on time,
memory and output. The environment is the one that Hugging Face documents for chat templates: trimmed
blocks, `break` and `continue`, `raise_exception`, `strftime_now`, `{% generation %}` marks. The date is
always the same, since a run must find the same tokens tomorrow.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from packmule.errors import DataError

Message = Mapping[str, Any]
Spans = tuple[tuple[int, int], ...]
"""Ranges of characters, in order, that do not overlap."""

SECONDS = 10.0
"""CPU time that rendering one conversation may take."""

MEMORY_BYTES = 512 << 20
"""What rendering one conversation may allocate."""

CHARACTERS = 64 << 20
"""What one conversation's text may come to, and every text on the way to it."""

_DATE = datetime(2024, 7, 26)
_BEGIN, _END, _PROBE = "\ue0f0", "\ue0f1", "\ue0f2"
_TEMPLATE_CHARACTERS = 1 << 20
_WIDTH = re.compile(r"%[^a-zA-Z%]*?(\d{4,}|\*)")


class Rendered(NamedTuple):
    """A conversation's text.

    Attributes:
        text: all of it.
        trained: what the assistant wrote, with the token that ends each turn.
        closed: the last turn ends with a special token of the template.
    """

    text: str
    trained: Spans
    closed: bool


class TemplateRefused(Exception):
    """A conversation that a template cannot render; the message says why."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        text: the template.
        variables: what it may use besides messages: bos_token, eos_token, ...
        specials: special tokens of the vocabulary; one of them ends a turn.
        source: where the template came from, for messages.

    Raises:
        DataError: it is not valid.
    """

    def __init__(
        self, text: str, variables: Mapping[str, str], specials: Collection[str], source: Path
    ) -> None:
        self.text, self.variables, self.source = text, dict(variables), source
        self._specials = sorted(filter(None, specials), key=len, reverse=True)
        self._environment = _Environment()
        try:
            if len(text) > _TEMPLATE_CHARACTERS:
                raise DataError(
                    f"{source}: the chat template has {len(text)} characters, more than any model's.",
                    "get the tokenizer again",
                )
            with bounded(SECONDS, MEMORY_BYTES):
                self._template = self._environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"{source}: line {error.lineno} of the chat template is not valid: {error.message}.",
                "correct it, or name another with data.chat_template",
            ) from None
        except (RecursionError, MemoryError, TooMuch, jinja2.TemplateError, ValueError) as error:
            raise DataError(
                f"{source}: the chat template cannot be compiled: {str(error) or type(error).__name__}.",
                "correct it, or name another with data.chat_template",
            ) from None

    @cached_property
    def digest(self) -> str:
        """sha256 of everything that changes what is rendered."""
        parts = [self.text, sorted(self.variables.items()), self._specials]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def text_of(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """The text of some messages, and with `generation_prompt` of the assistant's turn to come.

        Raises:
            TemplateRefused: the template raises, or takes too much time, memory or room.
        """
        return self._render(messages, generation_prompt)[0]

    def render(self, messages: Sequence[Message]) -> Rendered:
        """A conversation's text and what of it the assistant wrote.

        Where the template marks that (`{% generation %}`), its marks decide, as in transformers. Elsewhere
        a turn begins where the text of the messages before it, with the prompt for the assistant's turn,
        ends; and ends with the special token the template puts after an answer.

        Raises:
            TemplateRefused: as `text_of`; or it cannot be told where an answer lies.
        """
        text, marks = self._render(messages, False)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        closed = bool(answers) and answers[-1] == len(messages) - 1 and self._turn_end is not None
        if marks or not answers:
            return Rendered(text, marks, closed)
        starts = self._starts(messages, answers, text)
        limits = [*starts[1:], len(text)]
        spans = [
            (start, self._end(messages, i, text, start, limit))
            for i, start, limit in zip(answers, starts, limits, strict=True)
        ]
        return Rendered(text, tuple(spans), closed)

    def _starts(self, messages: Sequence[Message], answers: Sequence[int], text: str) -> list[int]:
        """Where the answers begin in `text`."""
        if len(answers) > 2 and (prompt := self._generation_prompt):
            # where the prompt for an answer is there once for each, its places are theirs: one text instead
            # of one for every answer, checked at the first and the last
            found = [match.end() for match in re.finditer(re.escape(prompt), text)]
            if len(found) == len(answers):
                ends = [self._start(messages, answers[0], text, 0)]
                ends.append(self._start(messages, answers[-1], text, ends[0]))
                if ends == [found[0], found[-1]]:
                    return found
        starts: list[int] = []
        for i in answers:
            starts.append(self._start(messages, i, text, starts[-1] if starts else 0))
        return starts

    def _start(self, messages: Sequence[Message], i: int, text: str, after: int) -> int:
        """Where answer number i begins in `text`, at `after` or later."""
        try:
            before = self.text_of(messages[:i], True) if i else ""
        except TemplateRefused:
            before = ""
        if before and text.startswith(before) and len(before) >= after:
            return len(before)
        prompt = self._generation_prompt
        upto = self.text_of(messages[: i + 1])
        if prompt and text.startswith(upto) and (at := text.find(prompt, after, len(upto))) >= 0:
            return at + len(prompt)
        raise TemplateRefused(f"it cannot be told where message {i + 1}, an answer, begins in its text")

    def _end(self, messages: Sequence[Message], i: int, text: str, start: int, limit: int) -> int:
        """Where answer number i, which begins at `start`, ends: before `limit`."""
        if self._turn_end is not None:
            # an answer may itself hold the token that ends a turn; a template may change what it holds
            content = str(messages[i]["content"]).strip()
            found = text.find(content, start, limit)
            at = text.find(self._turn_end, start if found < 0 else found + len(content), limit)
            if at >= 0:
                return at + len(self._turn_end)
        if i == len(messages) - 1:
            return len(text)
        upto = self.text_of(messages[: i + 1])
        if text.startswith(upto) and len(upto) > start:
            return len(upto)
        raise TemplateRefused(f"it cannot be told where message {i + 1}, an answer, ends in its text")

    @cached_property
    def _generation_prompt(self) -> str:
        """What the template puts before an answer."""
        question = [{"role": "user", "content": "a"}]
        try:
            without, prompted = self.text_of(question), self.text_of(question, True)
        except TemplateRefused:
            return ""
        return prompted.removeprefix(without) if prompted.startswith(without) else ""

    @cached_property
    def _turn_end(self) -> str | None:
        """What the template puts after an answer, to the end of its first special token; None: no such."""
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        try:
            after = self.text_of(turn).partition(_PROBE)[2]
        except TemplateRefused:
            return None
        found = [(after.find(token), -len(token)) for token in self._specials if token in after]
        at, size = min(found, default=(-1, 0))
        return after[: at - size] if found else None

    def _render(self, messages: Sequence[Message], generation_prompt: bool) -> tuple[str, Spans]:
        marks = self._environment.marks
        marks.count = 0
        variables = {"tools": None, "documents": None, **self.variables}
        parts, size = [], 0
        try:
            with bounded(SECONDS, MEMORY_BYTES):
                for part in self._template.generate(
                    messages=messages, add_generation_prompt=generation_prompt, **variables
                ):
                    size += len(part)
                    if size > CHARACTERS:
                        raise TooMuch(f"its text is longer than {CHARACTERS >> 20} Mi characters")
                    parts.append(part)
        except MemoryError:
            raise TemplateRefused(f"rendering it takes more than {MEMORY_BYTES >> 20} MiB") from None
        except RecursionError:
            raise TemplateRefused("rendering it never ends") from None
        except (TooMuch, jinja2.TemplateError) as error:
            raise TemplateRefused(str(error) or type(error).__name__) from None
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError) as error:
            raise TemplateRefused(f"{type(error).__name__}: {error}") from None
        return _without_marks("".join(parts), marks.count)


class TooMuch(Exception):
    """A template that takes too much time or room."""


@contextmanager
def bounded(seconds: float, memory: int) -> Iterator[None]:
    """Bound the CPU time of this process (in its main thread only) and its further memory inside.

    Raises:
        TooMuch: the time is over.
        MemoryError: from what allocates beyond.
    """
    timed = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    before = signal.signal(signal.SIGVTALRM, _too_long) if timed else None
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + memory
    lowered = limit > memory and (soft == resource.RLIM_INFINITY or limit < soft)
    try:
        if lowered:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, before)
        if lowered:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _too_long(number: int, frame: Any) -> None:
    raise TooMuch(f"rendering takes more than {SECONDS:g} seconds")


def _data_bytes() -> int:
    """What RLIMIT_DATA counts in this process; 0 where /proc does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def _without_marks(text: str, marked: int) -> tuple[str, Spans]:
    if not marked:
        return text, ()
    pieces = re.split(f"([{_BEGIN}{_END}])", text)
    if [piece for piece in pieces[1::2]] != [_BEGIN, _END] * marked:
        raise TemplateRefused("its text holds the private characters that mark what the assistant wrote")
    plain, spans, begin = list[str](), list[tuple[int, int]](), 0
    size = 0
    for piece in pieces:
        if piece == _BEGIN:
            begin = size
        elif piece == _END:
            if size > begin:
                spans.append((begin, size))
        else:
            plain.append(piece)
            size += len(piece)
    return "".join(plain), tuple(spans)


class _Marks(Extension):
    """`{% generation %}...{% endgeneration %}`: what the assistant wrote, between private characters."""

    tags = {"generation"}  # noqa: RUF012

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.count = 0
        environment.extend(marks=self)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        self.count += 1
        return f"{_BEGIN}{caller()}{_END}"


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with operators that cannot make something huge in one stroke."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    marks: _Marks

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _DATE.strftime

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse what would be too large, else compute it; see the base class."""
        if _size(operator, left, right) > CHARACTERS:
            raise SecurityError(f"{operator!r} makes something too large")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """A bound on the length of a result, or the bits of a number."""
    numbers = isinstance(left, int) and isinstance(right, int)
    if numbers and operator in ("*", "**"):
        bits = left.bit_length()
        return bits * max(right, 0) if operator == "**" else bits + right.bit_length()
    if operator == "%":
        return CHARACTERS + 1 if isinstance(left, str) and _WIDTH.search(left) else 0
    sizes = [len(side) if hasattr(side, "__len__") else side for side in (left, right)]
    if not all(isinstance(size, int) for size in sizes) or numbers:
        return 0
    return sizes[0] * sizes[1] if operator == "*" else sum(sizes)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: not escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)
