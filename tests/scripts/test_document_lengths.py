"""Samples have the published distributions."""

from __future__ import annotations

import pytest

from scripts.bench.document_lengths import DISTRIBUTIONS, PROLONG, WLB, Range, sample


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_sample_has_exactly_the_tokens_and_depends_on_its_seed(distribution: str) -> None:
    one = sample(distribution, 1_000_000, 5)
    assert sum(one) == 1_000_000
    assert min(one) > 0
    assert one == sample(distribution, 1_000_000, 5)
    assert one != sample(distribution, 1_000_000, 6)


@pytest.mark.parametrize(("distribution", "ranges"), [("prolong", PROLONG), ("wlb", WLB)])
def test_ranges_have_the_published_shares_and_means(distribution: str, ranges: tuple[Range, ...]) -> None:
    lengths = sample(distribution, 100_000_000, 0)
    for part in ranges:
        inside = [length for length in lengths if part.start <= length < part.stop]
        expected = part.share / 100 * len(lengths)
        assert abs(len(inside) - expected) <= 5 * expected**0.5
        spread = (part.stop - part.start) / len(inside) ** 0.5
        assert abs(sum(inside) / len(inside) - part.mean) <= 3 * spread


def test_long_documents_have_the_published_shares() -> None:
    """ProLong: 15.1 % of tokens are in 8-16K. WLB: 12.8 % of tokens, 67 % of the squares, in 64-128K."""
    prolong = sample("prolong", 100_000_000, 1)
    middle = [n for n in prolong if 8192 <= n < 16384]
    assert sum(middle) / sum(prolong) == pytest.approx(0.151, abs=0.01)
    wlb = sample("wlb", 100_000_000, 1)
    longest = [n for n in wlb if n >= 65536]
    assert sum(longest) / sum(wlb) == pytest.approx(0.128, abs=0.02)
    assert sum(n * n for n in longest) / sum(n * n for n in wlb) == pytest.approx(0.67, abs=0.04)


def test_prolong64k_has_the_published_share_of_packed_documents() -> None:
    lengths = sample("prolong64k", 20_000_000, 0)
    packed = sum(n for n in lengths if n == 65536)
    assert packed / sum(lengths) == pytest.approx(0.6, abs=0.01)
    assert max(lengths) == 65536


@pytest.mark.parametrize(("distribution", "mean"), [("arxiv", 15_910), ("github", 1_792)])
def test_parts_of_the_pile_have_the_published_means(distribution: str, mean: int) -> None:
    lengths = sample(distribution, 30_000_000, 0)
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.06)


def test_wrong_distributions_and_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="use one of prolong"):
        sample("nothing", 10, 0)
    with pytest.raises(ValueError, match="tokens: -1"):
        sample("wlb", -1, 0)
