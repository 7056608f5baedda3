"""Planner of rounds of messages that fit into a bucket: the same rounds on every rank.

A bucket holds what one rank has in flight in one round: what it sends and what it receives. Moves
are cut along any dimension into parts much smaller than a bucket. The parts of a round that travel
along the same tree form one message. Every move takes the first round in which all its ranks have
room. A rank skips rounds that it takes no part in, so groups of ranks that share no move fill their
buckets independently.

Pure: integers in, dataclasses out. Bytes are those of the tensors as they travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.plan.transfer_plan import Plan
from mcore_rl.hybrid_engine.plan.trees import Tree
from mcore_rl.model.boxes import Box, volume
from mcore_rl.model.tensors import TensorInfo

SIZE_BYTES = 8  # the int64 size that travels ahead of a message in delta mode
WORD_BYTES = 8  # delta mode compares messages in words
# A part is at most 1 / this of a bucket. Larger parts leave more of a bucket empty when the next
# part does not fit; a source that converts its data also needs one part of extra memory.
_PARTS_PER_BUCKET = 4
PREPARE, POST = "prepare", "post"  # a rank's steps on a bucket, see `steps`


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, and where its bytes start in its message."""

    tensor: str
    box: Box
    num_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Message:
    """The data that one tree carries in one round: parts without gaps, each aligned.

    Example: `Message(tree, (Part("a", ((0, 4),), 8, 0), Part("b", ((2, 3),), 2, 8)),
    num_bytes=10)`.
    """

    tree: Tree
    parts: tuple[Part, ...]
    num_bytes: int

    @property
    def source(self) -> int:
        return self.tree.source


@dataclass(frozen=True, slots=True)
class Frame:
    """The space of a message in a bucket: its front, then its content, padded.

    `alignment` is the plan's largest element in bytes. In delta mode the front has room for the
    message's size and the bitmap of its words, which ends where the content begins. Without delta
    the front is empty.
    """

    alignment: int
    with_delta: bool

    def front_bytes(self, num_bytes: int) -> int:
        """Return the bytes ahead of the content of a message of `num_bytes`."""
        if not self.with_delta:
            return 0
        return _round_up(SIZE_BYTES + bitmap_bytes(num_bytes), self.alignment)

    def total_bytes(self, num_bytes: int) -> int:
        """Return the bytes that a message of `num_bytes` takes up."""
        return self.front_bytes(num_bytes) + _round_up(num_bytes, self.alignment)


def bitmap_bytes(num_bytes: int) -> int:
    """Return the size of a bit per word of a message of `num_bytes`, padded to words."""
    return padded_bytes(-(-num_bytes // (8 * WORD_BYTES)))


def padded_bytes(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to words."""
    return _round_up(num_bytes, WORD_BYTES)


def frame_of(itemsizes: Mapping[str, int], *, with_delta: bool) -> Frame:
    """Return the frame for tensors with elements of `itemsizes` bytes (tensor -> bytes)."""
    largest = max(itemsizes.values(), default=1)
    return Frame(max(largest, 8) if with_delta else largest, with_delta)


def slot_bytes(bucket_bytes: int, num_slots: int, frame: Frame) -> int:
    """Return the share of `bucket_bytes` of each of `num_slots` rotating buffers.

    Raises UsageError if it does not hold the smallest message, one element.
    """
    share = bucket_bytes // num_slots
    smallest = frame.total_bytes(frame.alignment)
    if share < smallest:
        raise UsageError(
            f"gives a bucket of {bucket_bytes} bytes, which must hold {num_slots} messages of at "
            f"least {smallest} bytes each",
            flag="--rl-reshard-bucket-mb",
            remedy=f"raise it to {num_slots * smallest} bytes or more",
        )
    return share


def make_rounds(
    plan: Plan,
    itemsizes: Mapping[str, int],
    *,
    slot_bytes: int,
    frame: Frame,
    rank: int | None = None,
) -> dict[int, list[Message]]:
    """Return round -> messages, in the order in which all ranks process them.

    On every rank and in every round, the messages that it sends or receives take up at most
    `slot_bytes` (in `frame`), and the rounds of a rank's moves do not decrease along the plan. With
    `rank`, only that rank's messages are returned; the round numbers do not change.
    """
    assert frame.total_bytes(frame.alignment) <= slot_bytes, "see `slot_bytes`"
    part_bytes = max(frame.alignment, slot_bytes // _PARTS_PER_BUCKET)
    current: dict[int, int] = {}  # rank -> the round it is in
    used: dict[int, int] = {}  # rank -> its bytes in that round
    sizes: dict[tuple[int, int], int] = {}  # (round, tree) -> bytes of content so far
    parts: dict[tuple[int, int], list[tuple[str, Box, int]]] = {}
    trees: dict[Tree, int] = {}  # -> its number
    numbers: dict[int, int] = {}  # the same by object id, to hash few trees
    for move in plan.moves:
        if id(move.tree) not in numbers:
            numbers[id(move.tree)] = trees.setdefault(move.tree, len(trees))
        tree = numbers[id(move.tree)]
        ranks = (move.source, *move.receivers)
        keep = rank is None or rank in ranks
        itemsize = itemsizes[move.tensor]
        for box in cut(move.box, max(1, part_bytes // itemsize)):
            num_bytes = volume(box) * itemsize
            number = max(current.get(r, 0) for r in ranks)
            key = (number, tree)
            before = sizes.get(key, 0)
            growth = frame.total_bytes(before + num_bytes)
            growth -= frame.total_bytes(before) if before else 0
            held = max(used.get(r, 0) for r in ranks if current.get(r, 0) == number)
            if held + growth > slot_bytes:
                key = (number + 1, tree)
                before, growth = 0, frame.total_bytes(num_bytes)
            for r in ranks:
                stays = current.get(r, 0) == key[0]
                used[r] = (used.get(r, 0) if stays else 0) + growth
                current[r] = key[0]
            sizes[key] = before + num_bytes
            if keep:
                parts.setdefault(key, []).append((move.tensor, box, num_bytes))
    rounds: dict[int, list[Message]] = {}
    tree_of = list(trees)
    for (number, tree), content in parts.items():
        rounds.setdefault(number, []).append(_message(tree_of[tree], content, itemsizes))
    return dict(sorted(rounds.items()))


def _message(
    tree: Tree,
    content: list[tuple[str, Box, int]],
    itemsizes: Mapping[str, int],
) -> Message:
    """Build a message, larger elements first, so that every part is aligned without gaps."""
    parts: list[Part] = []
    offset = 0
    for tensor, box, num_bytes in sorted(content, key=lambda item: -itemsizes[item[0]]):
        parts.append(Part(tensor, box, num_bytes, offset))
        offset += num_bytes
    return Message(tree, tuple(parts), offset)


def cut(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut `box` into boxes of at most `max_elements`, in row-major order; none if it is empty.

    Boxes are complete rows if one fits. Otherwise a row is cut along the next dimension, and so on,
    in parts as even as the dimension allows.
    """
    size = volume(box)
    if size == 0:
        return
    if size <= max_elements:
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    row = size // (stop - start)
    num_parts = -(-(stop - start) // max(1, max_elements // row))
    for i in range(num_parts):
        first, last = (start + (stop - start) * j // num_parts for j in (i, i + 1))
        yield from cut((*box[:dim], (first, last), *box[dim + 1 :]), max_elements)


@dataclass(frozen=True, slots=True)
class Placed:
    """A message of this rank and its place in a buffer, in bytes from the buffer's start.

    The content starts at `content`. In delta mode an encoded message starts at `encoded`, so that
    its bitmap ends where the content begins, and its size is at `start`.
    """

    number: int  # among all messages of this rank
    message: Message
    start: int
    encoded: int
    content: int
    end: int

    def region(self, num_bytes: int) -> slice:
        """Return where in the buffer the message lies when it travels with `num_bytes`."""
        first = self.content if num_bytes == self.message.num_bytes else self.encoded
        return slice(first, first + num_bytes)


def place(rounds: Mapping[int, Sequence[Message]], frame: Frame) -> list[list[Placed]]:
    """Place the messages of each of a rank's buckets one behind the other."""
    buckets: list[list[Placed]] = []
    number = 0
    for messages in rounds.values():
        buckets.append([])
        at = 0
        for message in messages:
            content = at + frame.front_bytes(message.num_bytes)
            encoded = content - (bitmap_bytes(message.num_bytes) if frame.with_delta else 0)
            end = at + frame.total_bytes(message.num_bytes)
            buckets[-1].append(Placed(number, message, at, encoded, content, end))
            number, at = number + 1, end
    return buckets


def steps(round_numbers: Sequence[int], *, ahead: int) -> list[tuple[str, int]]:
    """Return the order of a rank's steps on its buckets, one per round of `round_numbers`.

    A round's messages start after the sizes of the next `ahead` rounds. Steps are ordered by round
    number, not by bucket: a rank that skips rounds must start the messages it shares with another
    rank in that rank's order.
    """
    timed = [
        item
        for bucket, number in enumerate(round_numbers)
        for item in ((number, 0, PREPARE, bucket), (number + ahead, 1, POST, bucket))
    ]
    return [(what, bucket) for _, _, what, bucket in sorted(timed)]


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's part in a transfer, and the order in which received tensors are delivered."""

    buckets: list[list[Placed]]
    steps: list[tuple[str, int]]
    position: dict[str, int]  # tensor -> its place in the plan
    planned_bytes: int  # bytes that the rank receives


def make_route(
    plan: Plan, tensors: Mapping[str, TensorInfo], rank: int, share: int, frame: Frame
) -> Route:
    """Return the route of `rank` through `plan` with buffers of `share` bytes."""
    position = {move.tensor: i for i, move in reversed(list(enumerate(plan.moves)))}
    itemsizes = {name: tensors[name].itemsize for name in position}
    rounds = make_rounds(plan, itemsizes, slot_bytes=share, frame=frame, rank=rank)
    buckets = place(rounds, frame)
    order = steps(list(rounds), ahead=1 if frame.with_delta else 0)
    return Route(buckets, order, position, plan.received_bytes(rank))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
