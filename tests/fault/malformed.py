"""Files as nobody should write them, and what reading them may do: end, or raise a PackmuleError.

A case that takes longer than DEADLINE_SECONDS, or more than ROOM_BYTES above what the process holds, fails.
"""

from __future__ import annotations

import resource
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from packmule.errors import PackmuleError

DEADLINE_SECONDS = 20
"""A hundred times what the slowest case takes; a hang, not a slow machine."""
ROOM_BYTES = 256 << 20

EXTREMES = (0, 1, 2, 3, 7, 8, 31, 32, 255, 256, 4095, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60,
            2**62, 2**63 - 1, 2**63, 2**64 - 1)  # fmt: skip


class Hang(BaseException):
    """A case that did not end in time."""


@contextmanager
def bounded() -> Iterator[None]:
    """Memory and time as the module's docstring says; MemoryError or Hang inside where they are not kept."""

    def late(number: int, frame: object) -> None:
        raise Hang(f"still running after {DEADLINE_SECONDS} s")

    limit = resource.getrlimit(resource.RLIMIT_DATA)
    held = int(next(line for line in Path("/proc/self/status").read_text().splitlines()
                    if line.startswith("VmData")).split()[1]) << 10  # fmt: skip
    old = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_DATA, (held + ROOM_BYTES, limit[1]))
    signal.alarm(DEADLINE_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_DATA, limit)


def outcome(read: Callable[[], Any]) -> str:
    """Run a reader under the bounds: "read", or the cause of its PackmuleError. Anything else escapes."""
    with bounded():
        try:
            read()
        except PackmuleError as error:
            assert error.cause.strip() and error.hint.strip(), repr(error)
            assert len(str(error)) < 4000, "a message as long as the damage"
            return error.cause
    return "read"


def examples(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], count: int, start: int) -> None:
    """Run `check` on `count` drawn cases.

    Args:
        start: the seed of the draws.
    """

    @seed(start)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(case: Any) -> None:
        check(case)

    run()


class _Bytes(bytes):
    """A file's content that is not printed whole."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes, crc {zlib.crc32(self):08x}>"


def spoiled(data: bytes, header: int) -> st.SearchStrategy[bytes]:
    """`data` with one to three faults in its first `header` bytes: bits, numbers, cuts, insertions."""
    at = st.integers(0, max(0, header - 1))

    def flip(old: bytes, place: int, mask: int) -> bytes:
        return old[:place] + bytes([old[place] ^ mask]) + old[place + 1 :] if place < len(old) else old

    def number(old: bytes, place: int, value: int, size: int) -> bytes:
        return old[:place] + (value % 256**size).to_bytes(size, "little") + old[place + size :]

    def insert(old: bytes, place: int, more: bytes) -> bytes:
        return old[:place] + more + old[place:]

    def repeat(old: bytes, place: int, length: int) -> bytes:
        return old[:place] + old[place : place + length] * 2 + old[place + length :]

    fault: st.SearchStrategy[Callable[[bytes], bytes]] = st.one_of(
        st.builds(lambda p, m: lambda old: flip(old, p, m), at, st.integers(1, 255)),
        st.builds(
            lambda p, v, s: lambda old: number(old, p, v, s),
            at,
            st.sampled_from(EXTREMES),
            st.sampled_from((1, 4, 8)),
        ),
        st.builds(lambda p: lambda old: old[:p], at),
        st.builds(lambda p, m: lambda old: insert(old, p, m), at, st.binary(min_size=1, max_size=12)),
        st.builds(lambda p, n: lambda old: repeat(old, p, n), at, st.integers(1, 64)),
    )

    def apply(faults: list[Callable[[bytes], bytes]]) -> bytes:
        found = data
        for one in faults:
            found = one(found)
        return _Bytes(found)

    return st.lists(fault, min_size=1, max_size=3).map(apply)


ODD_VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(EXTREMES).flatmap(lambda n: st.sampled_from((n, -n))),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=20),
    st.lists(st.integers(-(2**64), 2**64), max_size=5),
    st.just({}),
    st.just([[[[]]]]),
    st.just("F32"),
    st.just("\ud800"),
)
"""JSON values of any kind where one kind is expected."""


def twisted(value: Any) -> st.SearchStrategy[Any]:
    """A JSON value with one to three of its parts replaced, removed, repeated or renamed."""

    def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        yield path
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, inner in items:
            yield from places(inner, (*path, key))

    known = [path for path in places(value) if path]

    def change(node: Any, path: tuple[Any, ...], edit: Callable[[Any], Any]) -> Any:
        if not path:
            return edit(node)
        key, rest = path[0], path[1:]
        if isinstance(node, dict) and key in node:
            inner = change(node[key], rest, edit)
            kept = {k: v for k, v in node.items() if k != key}
            return kept if inner is _GONE else {**kept, key: inner}
        if isinstance(node, list) and isinstance(key, int) and key < len(node):
            inner = change(node[key], rest, edit)
            return [*node[:key], *([] if inner is _GONE else [inner]), *node[key + 1 :]]
        return node

    edit: st.SearchStrategy[Callable[[Any], Any]] = st.one_of(
        ODD_VALUES.map(lambda new: lambda old: new),
        st.just(lambda old: _GONE),
        st.just(lambda old: [old, old]),
        st.just(lambda old: old * 3 if isinstance(old, str | list) else old),
        st.just(lambda old: str(old)),
        st.just(lambda old: -old if isinstance(old, int) else old),
        st.just(lambda old: {"x": old}),
    )

    def apply(edits: list[tuple[tuple[Any, ...], Callable[[Any], Any]]]) -> Any:
        found = value
        for path, one in edits:
            found = change(found, path, one)
        return None if found is _GONE else found

    return st.lists(st.tuples(st.sampled_from(known), edit), min_size=1, max_size=3).map(apply)


_GONE = object()
