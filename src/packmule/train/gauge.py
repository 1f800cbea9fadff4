"""`python -m packmule.train.gauge`: build a user's modules and measure their tasks.

Reads one GaugeRequest from standard input; answers with a "report" event that holds a ModuleShape.
It is set up as a training child is, so that what it measures is what that will take: malloc is tuned
before torch is imported.
"""

from __future__ import annotations

import json
import sys

from packmule.shapes.bodies import PRIMITIVES_KEPT
from packmule.train.memory import tune_caches, tune_malloc
from packmule.train.messages import GaugeRequest, Sender, serve


def _work(text: str, sender: Sender) -> None:
    from packmule.train.module_costs import measured

    request = GaugeRequest.parse_json(text, "the request")
    sender.send("report", report=json.loads(measured(request, sender).model_dump_json()))


if __name__ == "__main__":
    tune_malloc()
    tune_caches(PRIMITIVES_KEPT)
    sys.exit(serve(_work))
