"""One level of the partition: places documents into bins. A bin is a node or a device.

The placement balances attention time (quadratic in the length) and tokens (capacity, linear layers). Long documents
dominate attention time, and go first, longest first, to the bin with the least attention time. Short documents dominate
tokens, and go to the bin with the fewest. A document that is too long for one bin is cut over several.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_overlap.schedules.varlen.topology import CostModel

Spill = Literal["cut", "shift"]
"""How room is found for a document that fits in no bin: `cut` cuts it, `shift` first moves shares of documents that
are already cut."""

GOOD_ENOUGH = 0.98
# Tried in order, (x, y): a document is cut above 1/x of the mean load of a bin; the last 1/y of the tokens are short.
_ATTEMPTS = ((2, 4), (4, 4), (1, 4), (8, 4), (4, 16), (2, 2), (8, 16), (16, 4), (16, 16), (32, 4), (64, 4), (64, 16))


class Item(NamedTuple):
    """A document, or the share of it that an upper level assigned: `tokens` of its `length`."""

    tokens: int
    length: int
    document: int
    attention_fs: int


@dataclass(slots=True)
class Placement:
    """Items and summed load of every bin; `spilled` is whether an item found room only through `Level.spill`."""

    items: list[list[Item]]
    attention_fs: list[int]
    message_fs: list[int]
    tokens: list[int]
    spilled: bool

    def evenness(self, linear_fs: int) -> float:
        """The lesser of two balances: of the longer of attention and messages, and of attention with linear layers."""
        total = [a + linear_fs * t for a, t in zip(self.attention_fs, self.tokens, strict=True)]
        peak = max(max(self.attention_fs), max(self.message_fs), 1)
        return min(sum(self.attention_fs) / peak, sum(total) / max(1, max(total))) / len(total)


@dataclass(frozen=True, slots=True)
class Level:
    """The bins of a level, and its limits.

    Attributes:
        capacity: tokens a bin may hold.
        message_fs: message time of a bin for a share of an item that is cut at this level (True) or above it (False).
        attempts: largest number of placements to try.
        spill: how room is found if not all items fit whole.
    """

    bins: int
    capacity: int
    cost: CostModel
    message_fs: Callable[[Item, bool], int]
    attempts: int
    spill: Spill = "cut"


def place(level: Level, items: Sequence[Item]) -> Placement:
    """Places items, by falling length, into bins, which have room for their sum.

    It first cuts only the longest documents, which needs the fewest messages. While a bin overflows or the result is
    uneven, the placement restarts and cuts shorter ones.
    """
    linear_fs = level.cost.linear_fs

    def most_even(spill: Spill | None, *, hidden_only: bool = False) -> Placement | None:
        """The placement of the best threshold, or of the first that reaches `GOOD_ENOUGH`."""
        best: Placement | None = None
        for threshold, short in _ATTEMPTS[: level.attempts]:
            found = _attempt(level, items, threshold, short, spill, hidden_only=hidden_only)
            if found is not None and (best is None or found.evenness(linear_fs) > best.evenness(linear_fs)):
                best = found
            if best is not None and (level.bins == 1 or best.evenness(linear_fs) >= GOOD_ENOUGH):
                break
        return best

    best = most_even(None) or most_even(level.spill)
    assert best is not None, "with cuts, items fit whenever their sum fits"
    if max(best.message_fs) > max(best.attention_fs):
        other = most_even(level.spill if best.spilled else None, hidden_only=True)
        if other is not None and other.evenness(linear_fs) > best.evenness(linear_fs):
            best = other
    return best


def _attempt(
    level: Level, items: Sequence[Item], threshold: int, short: int, spill: Spill | None, *, hidden_only: bool
) -> Placement | None:
    """Places all items with one threshold; None if they do not fit.

    Args:
        spill: how room is found for an item that fits in no bin; None fails.
        hidden_only: do not cut for balance if the messages would take longer than the attention time that they save.
    """
    bins, capacity, message_fs = level.bins, level.capacity, level.message_fs
    result = Placement([[] for _ in range(bins)], [0] * bins, [0] * bins, [0] * bins, spill is not None)
    placed, attention, tokens = result.items, result.attention_fs, result.tokens
    fair = max(1, sum(item.attention_fs for item in items) // bins)
    limit = max(1, fair // threshold)
    shift = bins.bit_length()
    mask = (1 << shift) - 1

    def put(item: Item, bin_: int) -> None:
        """Places an item whole, or the share of it that an upper level assigned."""
        placed[bin_].append(item)
        attention[bin_] += item.attention_fs
        tokens[bin_] += item.tokens
        if item.tokens < item.length:
            result.message_fs[bin_] += message_fs(item, False)

    def put_shares(item: Item, shares: list[tuple[int, int]], message: int) -> None:
        for bin_, share in shares:
            fs = level.cost.share_fs(share, item.length)
            placed[bin_].append(Item(share, item.length, item.document, fs))
            attention[bin_] += fs
            tokens[bin_] += share
            result.message_fs[bin_] += message

    heap = list(range(bins))  # one integer per bin, attention << shift | bin: faster to compare than a tuple
    index, first_short = 0, _first_short(items, short)
    while index < len(items) and (index < first_short or items[index].attention_fs > limit):
        item, size, width = items[index], items[index].tokens, 1
        if item.attention_fs > limit or size > capacity:
            width = _width(level, item, None if hidden_only else fair, limit)
        if width > 1:
            chosen = _pop_with_room(heap, mask, tokens, capacity, size, width)
            if not chosen:
                break
            put_shares(item, _even(size, chosen, tokens), message_fs(item, True))
            for bin_ in chosen:
                heapq.heappush(heap, attention[bin_] << shift | bin_)
            index += 1
            continue
        while heap and tokens[heap[0] & mask] + size > capacity:
            heapq.heappop(heap)
        if not heap:
            break
        bin_ = heap[0] & mask
        put(item, bin_)
        heapq.heapreplace(heap, attention[bin_] << shift | bin_)
        index += 1

    heap = [count << shift | bin_ for bin_, count in enumerate(tokens)]
    heapq.heapify(heap)
    for item in items[index:]:
        bin_ = heap[0] & mask
        count = tokens[bin_] + item.tokens
        if count > capacity and spill == "shift" and _make_room(level, result, bin_, count - capacity):
            heap = [count << shift | other for other, count in enumerate(tokens)]
            heapq.heapify(heap)
            bin_ = heap[0] & mask
            count = tokens[bin_] + item.tokens
        if count <= capacity:
            put(item, bin_)
            heapq.heapreplace(heap, count << shift | bin_)
            continue
        shares = _fill(item.tokens, heap, mask, tokens, capacity) if spill else None
        if shares is None:
            return None
        put_shares(item, shares, message_fs(item, True))
        for bin_, _ in shares:
            heapq.heappush(heap, tokens[bin_] << shift | bin_)
    return result


def _first_short(items: Sequence[Item], short: int) -> int:
    """Index of the item at which the last 1/short of the tokens begin."""
    left = sum(item.tokens for item in items) // short
    index = len(items)
    while index and left > 0:
        index -= 1
        left -= items[index].tokens
    return index


def _width(level: Level, item: Item, fair: int | None, limit: int) -> int:
    """Number of bins over which a document is cut: enough for the limit, if attention still hides the messages.

    More bins are used if the document does not fit in fewer, or exceeds the mean load of fewer.
    """
    fs = item.attention_fs
    needed = -(-item.tokens // level.capacity)
    if fair is not None:
        needed = max(needed, -(-fs // fair))
    balanced = min(-(-fs // limit), fs // max(1, level.message_fs(item, True)))
    return min(max(needed, balanced), level.bins, item.tokens)


def _pop_with_room(
    heap: list[int], mask: int, tokens: Sequence[int], capacity: int, size: int, width: int
) -> list[int]:
    """Pops the `width` least loaded bins with room for an even share, and full bins. Empty if there are too few."""
    share = -(-size // width)
    chosen: list[int] = []
    while heap and len(chosen) < width:
        bin_ = heapq.heappop(heap) & mask
        if tokens[bin_] + share <= capacity:
            chosen.append(bin_)
    return chosen if len(chosen) == width else []


def _even(size: int, bins: Sequence[int], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Shares that differ by at most one token; the bins with the fewest tokens get the larger ones."""
    share, extra = divmod(size, len(bins))
    order = sorted(bins, key=lambda bin_: (tokens[bin_], bin_))
    return [(bin_, share + (place < extra)) for place, bin_ in enumerate(order)]


def _make_room(level: Level, placed: Placement, bin_: int, missing: int) -> bool:
    """Moves tokens of a document that is already cut from a bin to its other bins; returns whether that made room.

    Uneven shares cost less than one more cut.
    """
    for place, item in enumerate(placed.items[bin_]):
        if item.tokens == item.length or item.tokens <= missing:
            continue
        others = [
            (other, number)
            for other, items in enumerate(placed.items)
            if other != bin_
            for number, part in enumerate(items)
            if part.document == item.document
        ]
        if sum(level.capacity - placed.tokens[other] for other, _ in others) < missing:
            continue
        _resize(level, placed, bin_, place, -missing)
        for other, number in sorted(others, key=lambda found: (placed.tokens[found[0]], found[0])):
            more = min(missing, level.capacity - placed.tokens[other])
            _resize(level, placed, other, number, more)
            missing -= more
        return True
    return False


def _resize(level: Level, placed: Placement, bin_: int, place: int, more: int) -> None:
    item = placed.items[bin_][place]
    fs = level.cost.share_fs(item.tokens + more, item.length)
    placed.items[bin_][place] = item._replace(tokens=item.tokens + more, attention_fs=fs)
    placed.tokens[bin_] += more
    placed.attention_fs[bin_] += fs - item.attention_fs


def _fill(size: int, heap: list[int], mask: int, tokens: Sequence[int], capacity: int) -> list[tuple[int, int]] | None:
    """Fills the emptiest bins completely until `size` tokens are placed; None if there is not enough room."""
    shares: list[tuple[int, int]] = []
    while size and heap:
        bin_ = heapq.heappop(heap) & mask
        share = min(size, capacity - tokens[bin_])
        if share:
            shares.append((bin_, share))
            size -= share
    return None if size else shares
