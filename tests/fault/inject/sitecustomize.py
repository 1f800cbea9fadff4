"""Makes a training child run out of memory, or its disk hang; on the path of a test's processes only.

HUNG_DISK is a JSON object: this process's write number `write` to state.bin never returns; the deadline
is `seconds`.

OUT_OF_MEMORY is one too: `how` ("error": as torch says it; "limit": an allocation that the
process's own limit refuses; "abort": as C++ dies of it), `rows` (micro-batches of more rows fail) and
`step` (of this process, from 1 on).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import resource
import sys
import threading

ORDER = json.loads(os.environ.get("OUT_OF_MEMORY", "null"))
HUNG = json.loads(os.environ.get("HUNG_DISK", "null"))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, target, spoil):  # type: ignore[no-untyped-def]
        self.target = target
        self.spoil = spoil

    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name != self.target:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            execute(module)
            self.spoil(module)

        spec.loader.exec_module = exec_module
        return spec


def _left():  # type: ignore[no-untyped-def]
    """Bytes that the process's limit still allows."""
    with open("/proc/self/status") as status:
        held = next(line for line in status if line.startswith("VmData"))
    return resource.getrlimit(resource.RLIMIT_DATA)[0] - int(held.split()[1]) * 1024


def _spoil(module):  # type: ignore[no-untyped-def]
    kind = module.TaskKind.LAYER_BACKWARD
    body, steps = module.BODIES[kind], []

    def spoiled(runtime, task):  # type: ignore[no-untyped-def]
        if task.micro == 0 and task.block == len(runtime.model.blocks) - 2:
            steps.append(task)
        rows = runtime.model.plan.numerics.micro_rows[task.micro]
        if len(steps) >= ORDER["step"] and task.block == 1:
            if ORDER["how"] == "limit":
                import torch

                # Twice the rows do not fit, the rows do.
                share = rows / ORDER["rows"] * 2 / 3
                torch.empty(int(_left() * share), dtype=torch.uint8)
            elif rows > ORDER["rows"]:
                if ORDER["how"] == "abort":
                    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
                    os.abort()
                raise RuntimeError(
                    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
                )
        body(runtime, task)

    module.BODIES[kind] = spoiled


def _hang(module):  # type: ignore[no-untyped-def]
    DeadlineDisk, writes = module.DeadlineDisk, []
    init = DeadlineDisk.__init__

    def impatient(self, disk):  # type: ignore[no-untyped-def]
        init(self, disk, HUNG["seconds"])
        write = disk.write_summed

        def hanging(handle, spans, checksum):  # type: ignore[no-untyped-def]
            for span in spans:
                writes.extend([span.offset] * (handle.path.name == "state.bin"))
            if len(writes) >= HUNG["write"]:
                threading.Event().wait()
            return write(handle, spans, checksum)

        disk.write_summed = hanging

    DeadlineDisk.__init__ = impatient


if ORDER:
    sys.meta_path.insert(0, _Finder("packmule.engine.bodies", _spoil))
if HUNG:
    sys.meta_path.insert(0, _Finder("packmule.tiers.deadline", _hang))
