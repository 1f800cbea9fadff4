"""After a power loss at any moment the run is at its last commit or the one being made, and
every sync the code makes is needed for that."""

from __future__ import annotations

import pytest
from known_run import search

STATES = 3_000
LONG_STATES = 200_000
STATES_TO_FIND = 30_000
STATES_TO_CALL_ALL = 6_000
"""A tenth as many leave out the rarest sync for one seed in eight."""

SYNCS = (
    "create_files: sync_folder /",
    "create_files: sync_folder outputs",
    "create_files: sync_folder run",
    "load: sync_folder run",
    "commit: sync state.bin",
    "commit: sync_file HEAD.json.tmp",
    "commit: sync_folder run",
    "snapshot: sync state.bin",
    "snapshot: sync_file HEAD.json",
    "snapshot: sync_folder checkpoint-N.tmp",
    "snapshot: sync_folder run",
    "seal: sync state.bin",
    "seal: sync_file HEAD.json",
    "seal: sync_folder checkpoint-N.tmp",
    "seal: sync_folder run",
)


def test_every_state_a_power_loss_can_leave_recovers(seed: int, long: bool) -> None:
    states = LONG_STATES if long else STATES
    tried, fault, _ = search(seed, states)
    assert fault is None, f"state {tried}: {fault}"
    assert tried == states


def test_the_table_names_every_sync_of_the_code(seed: int) -> None:
    _, _, sites = search(seed, STATES_TO_CALL_ALL)
    assert sites == set(SYNCS)


@pytest.mark.parametrize("site", SYNCS)
def test_without_this_sync_a_power_loss_breaks_the_run(site: str, seed: int) -> None:
    tried, fault, _ = search(seed, STATES_TO_FIND, dropped=site)
    assert fault is not None, f"{tried} states recovered although nothing calls {site}"
