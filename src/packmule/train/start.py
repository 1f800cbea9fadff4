"""`python -m packmule.train.start PARENT MODULE`: run a module that ends when process PARENT does.

The binding must stand before anything slow is imported, and it must not be made between fork and
exec, where a parent with threads may not run Python. No torch.
"""

from __future__ import annotations

import runpy
import sys

from packmule.train.memory import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    del sys.argv[1]
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
