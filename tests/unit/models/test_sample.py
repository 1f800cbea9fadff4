"""Sampling the next token."""

from __future__ import annotations

import pytest
import torch

from packmule.models.decode import sample


def draws(logits: torch.Tensor, temperature: float, top_p: float, seed: int, count: int) -> torch.Tensor:
    """Relative frequency of every token."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [sample(logits, temperature, top_p, generator) for _ in range(count)]
    return torch.bincount(torch.tensor(drawn), minlength=len(logits)).double() / count


def test_temperature_zero_takes_the_most_likely_and_the_first_of_equals() -> None:
    assert sample(torch.tensor([0.0, 3.0, 3.0, 1.0]), 0.0, 1.0, None) == 1


def test_draws_follow_the_tempered_softmax(seed: int) -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(seed))
    for temperature in (0.7, 1.5):
        expected = torch.softmax(logits.double() / temperature, 0)
        # Five standard errors of the worst token.
        assert (
            float((draws(logits, temperature, 1.0, seed, 4000) - expected).abs().max()) < 5 * 0.5 / 4000**0.5
        )


def test_top_p_keeps_the_smallest_set_that_reaches_it(seed: int) -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log().float()
    assert draws(logits, 1.0, 0.39, seed, 200).nonzero().flatten().tolist() == [1]
    assert draws(logits, 1.0, 0.6, seed, 200).nonzero().flatten().tolist() == [1, 3]
    kept = draws(logits, 1.0, 0.6, seed, 4000)
    assert float(kept[1]) == pytest.approx(4 / 7, abs=0.05)


def test_one_seed_gives_one_sequence(seed: int) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(seed))
    runs = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(seed)
        runs.append([sample(logits, 1.0, 0.9, generator) for _ in range(20)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1


@pytest.mark.parametrize(("temperature", "top_p"), ((-0.1, 1.0), (1.0, 0.0), (1.0, 1.1)))
def test_values_out_of_range_are_refused(temperature: float, top_p: float) -> None:
    with pytest.raises(ValueError, match="top_p"):
        sample(torch.zeros(3), temperature, top_p, None)


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        sample(torch.tensor([0.0, float("nan")]), 0.0, 1.0, None)
