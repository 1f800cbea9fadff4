"""Kernels on torch's own threads compute the bits of kernels on threads of their own."""

from __future__ import annotations

import threading

import pytest
import torch

from packmule.kernels import load, native


def _results(kernels, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(777, 130, generator=generator).bfloat16()
    other = torch.randn(777, 130, generator=generator).bfloat16()
    out, down = torch.empty_like(x), torch.empty(130)
    rstd = torch.empty(777)
    kernels.rmsnorm(x, torch.ones(130).bfloat16(), 1e-6, out, rstd)
    dx = torch.empty_like(x)
    kernels.rmsnorm_backward(other, x, torch.ones(130).bfloat16(), rstd, dx, down, None, True)
    act = torch.empty_like(x)
    kernels.activate(x, other, act, "silu")
    square = torch.tensor(kernels.sum_squares(x.float()), dtype=torch.float64)
    return [out, rstd, dx, down, act, square]


@pytest.mark.skipif(native.library_path() is None, reason="the native library is not built")
def test_sharing_torchs_threads_changes_no_bit(seed: int) -> None:
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # the team exists
    own, shared = load(2), load(2, share=True)
    assert native.openmp_team() is not None, "torch's OpenMP run time was not found"
    try:
        for a, b in zip(_results(own, seed), _results(shared, seed), strict=True):
            assert torch.equal(a, b)
        found: list[list[torch.Tensor]] = []
        thread = threading.Thread(target=lambda: found.append(_results(shared, seed)))
        thread.start()
        thread.join()
        for a, b in zip(_results(own, seed), found[0], strict=True):
            assert torch.equal(a, b), "a thread that does not own the team"
    finally:
        own.close()
        shared.close()


def test_no_team_is_found_where_none_is_mapped(tmp_path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/dbus-daemon\n")
    assert native.openmp_team(maps) is None
    assert native.openmp_team(tmp_path / "missing") is None
