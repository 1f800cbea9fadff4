"""Writes a JSONL data set of Python's own documentation: one {"text"} record per topic or docstring.

The text comes with the interpreter: the language reference that `help()` shows (pydoc_data.topics)
and the docstrings of a fixed list of standard modules, which are parsed and not run. The same
Python version gives the same file. Usage: python examples/make_pydocs.py [TARGET] (data/pydocs.jsonl)
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

_NAMES = """
abc argparse ast asyncio.base_events asyncio.events asyncio.locks asyncio.queues asyncio.streams
asyncio.subprocess asyncio.tasks base64 bdb bisect bz2 calendar cmd code codecs codeop collections
collections.abc colorsys compileall concurrent.futures._base concurrent.futures.process
concurrent.futures.thread configparser contextlib copy copyreg csv ctypes dataclasses datetime
dbm decimal difflib dis doctest email.charset email.header email.message email.policy email.utils
encodings enum filecmp fileinput fnmatch fractions ftplib functools genericpath getopt getpass
gettext glob graphlib gzip hashlib heapq hmac html html.parser http http.client http.cookiejar
http.cookies http.server imaplib importlib.abc importlib.metadata importlib.resources importlib.util
inspect io ipaddress json json.decoder json.encoder keyword linecache locale logging logging.config
logging.handlers lzma mailbox mimetypes modulefinder multiprocessing.connection
multiprocessing.context multiprocessing.managers multiprocessing.pool multiprocessing.shared_memory
netrc ntpath numbers operator optparse os pathlib pdb pickle pickletools pkgutil platform plistlib
poplib posixpath pprint profile pstats py_compile pyclbr pydoc queue quopri random re reprlib
rlcompleter runpy sched secrets selectors shelve shlex shutil signal site smtplib socket
socketserver sqlite3.dbapi2 ssl stat statistics string stringprep struct subprocess symtable
sysconfig tabnanny tarfile telnetlib tempfile textwrap threading timeit tkinter token tokenize trace
traceback tracemalloc turtle types typing unittest.case unittest.loader unittest.mock
unittest.runner unittest.suite urllib.error urllib.parse urllib.request urllib.robotparser uuid venv
warnings wave weakref webbrowser wsgiref.handlers wsgiref.headers wsgiref.simple_server
wsgiref.validate xml.dom.minidom xml.dom.pulldom xml.etree.ElementTree xml.sax.handler
xml.sax.saxutils xmlrpc.client xmlrpc.server zipapp zipfile zipimport zoneinfo
"""
MODULES = tuple(_NAMES.split())
MIN_CHARACTERS = 80
TARGET = Path("data/pydocs.jsonl")


def topics() -> Iterator[str]:
    """The language reference, one text per topic."""
    from pydoc_data import topics as data

    for name in sorted(data.topics):
        yield data.topics[name].strip()


def docstrings(module: str) -> Iterator[str]:
    """The docstrings of a module and of its public classes and functions, each under its name.

    A module that this Python lacks, or that has no source, gives none.
    """
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    doc = ast.get_docstring(tree)
    if doc:
        yield f"{module}\n\n{doc.strip()}"
    yield from _members(tree, module)


def _members(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if child.name.startswith("_"):
            continue
        name = f"{prefix}.{child.name}"
        signature = "" if isinstance(child, ast.ClassDef) else f"({ast.unparse(child.args)})"
        doc = ast.get_docstring(child)
        if doc:
            yield f"{name}{signature}\n\n{inspect.cleandoc(doc).strip()}"
        if isinstance(child, ast.ClassDef):
            yield from _members(child, name)


def texts() -> Iterator[str]:
    """Every text once, in a fixed order, short ones left out."""
    seen: set[str] = set()
    for source in (topics(), *(docstrings(module) for module in MODULES)):
        for text in source:
            body = text.split("\n\n", 1)[-1]
            if len(text) >= MIN_CHARACTERS and body not in seen:
                seen.add(body)
                yield text


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    target = Path(arguments[0]) if arguments else TARGET
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    count = 0
    with open(partial, "w", encoding="utf-8") as file:
        for text in texts():
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            count += 1
    partial.rename(target)
    print(f"{target}: {count} documents, {target.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
