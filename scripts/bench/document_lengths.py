"""Document lengths: seeded samples of published distributions.

Sources, all lengths in tokens:

- `prolong`, `wlb`: shares and mean lengths per range, counted over the samples that the authors of DistCA publish for
  ProLong (arXiv 2410.02660) and WLB-LLM (arXiv 2503.17924): github.com/hao-ai-lab/distca at 039f2e4, `simulator/data`.
- `prolong64k`: the mixture of ProLong's first stage (arXiv 2410.02660, section 5): code repositories and books packed
  to 65,536 tokens are 60 % of the tokens. The rest is drawn from `prolong` below 64K.
- `arxiv`, `github`: the subsets of the Pile with these names. The mean sizes, 46.61 and 5.25 KiB, are published (arXiv
  2101.00027, table 1). Assumptions: 3 bytes per token, a log-normal shape, its spread, and a cut at 256K tokens.
"""

import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple


class Range(NamedTuple):
    """Documents of `start` to `stop` tokens: their share among the documents, and their mean length."""

    start: int
    stop: int
    share: float
    mean: float


PROLONG = (
    Range(575, 1024, 14.937, 852.1),
    Range(1024, 2048, 38.430, 1473.3),
    Range(2048, 4096, 26.961, 2873.3),
    Range(4096, 8192, 14.414, 5607.7),
    Range(8192, 16384, 4.273, 10784.5),
    Range(16384, 32768, 0.779, 21318.3),
    Range(32768, 65536, 0.146, 43085.8),
    Range(65536, 131072, 0.038, 91137.9),
    Range(131072, 262144, 0.017, 201692.5),
    Range(262144, 340150, 0.005, 329375.3),
)
WLB = (
    Range(1, 6250, 97.231, 3129.0),
    Range(6250, 8192, 0.396, 7157.6),
    Range(8192, 16384, 1.036, 11126.7),
    Range(16384, 32768, 0.451, 22478.0),
    Range(32768, 65536, 0.355, 46696.5),
    Range(65536, 124914, 0.531, 95545.0),
)
_BYTES_PER_TOKEN, _LONGEST = 3, 262144


def sample(distribution: str, tokens: int, seed: int) -> list[int]:
    """Draws documents until they have `tokens` tokens; the last one is cut. A seed gives the same lengths everywhere.

    Raises:
        ValueError: the distribution is unknown, or `tokens` is negative.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution: {distribution}: use one of {', '.join(DISTRIBUTIONS)}")
    if tokens < 0:
        raise ValueError(f"tokens: {tokens}: give 0 or more")
    draw = DISTRIBUTIONS[distribution](random.Random(f"{distribution} {seed}"))
    lengths: list[int] = []
    left = tokens
    while left:
        lengths.append(min(next(draw), left))
        left -= lengths[-1]
    return lengths


def _from_ranges(ranges: tuple[Range, ...], rng: random.Random) -> Iterator[int]:
    """Draws a range by its share, then a length, uniform below or above the mean, so that the range keeps its mean."""
    ends = list(accumulate(part.share for part in ranges))
    while True:
        part = ranges[min(bisect(ends, rng.random() * ends[-1]), len(ranges) - 1)]
        below = rng.random() * (part.stop - part.start) < part.stop - part.mean
        low, high = (part.start, part.mean) if below else (part.mean, part.stop)
        yield max(1, min(part.stop - 1, int(low + rng.random() * (high - low))))


def _mixed_64k(rng: random.Random) -> Iterator[int]:
    short = _from_ranges(PROLONG[:7], rng)
    long = 65536
    packed, other = 0, 0
    while True:
        if packed * 2 <= other * 3:
            packed += long
            yield long
        else:
            length = next(short)
            other += length
            yield length


def _log_normal(mean: float, sigma: float, rng: random.Random) -> Iterator[int]:
    mu = math.log(mean) - sigma * sigma / 2
    while True:
        length = int(math.exp(rng.gauss(mu, sigma)))
        if 1 <= length <= _LONGEST:
            yield length


DISTRIBUTIONS: Mapping[str, Callable[[random.Random], Iterator[int]]] = MappingProxyType(
    {
        "prolong": lambda rng: _from_ranges(PROLONG, rng),
        "prolong64k": _mixed_64k,
        "wlb": lambda rng: _from_ranges(WLB, rng),
        "arxiv": lambda rng: _log_normal(46.61 * 1024 / _BYTES_PER_TOKEN, 0.8, rng),
        "github": lambda rng: _log_normal(5.25 * 1024 / _BYTES_PER_TOKEN, 1.5, rng),
    }
)
