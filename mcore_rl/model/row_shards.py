"""Parameters of which a rank holds some rows only: Megatron-FSDP shards them over data parallelism.

Megatron-FSDP lays the parameters of a layer into one flat bucket and gives each data-parallel rank
an equal stretch of it. The stretches begin and end where a row of every parameter does, so that a
rank holds, of each parameter, consecutive rows: all, some or none. `weight_map` describes the whole
parameter; what is cut here is the part of that description that lies in the rank's rows, so that
the hand-over sends each row from where it is and nothing is gathered first.

This module is pure: integers and boxes in, boxes out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from mcore_rl.model.boxes import Box, full_box, intersect, relative
from mcore_rl.model.weight_map import Piece


def rows_of_flat_range(name: str, shape: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """The rows that are elements `start` to `stop` of a parameter of `shape`, counted row by row.

    An empty range is no rows. Raises RuntimeError naming the parameter if the range cuts a row.
    """
    if start == stop:
        return (0, 0)
    width = math.prod(shape[1:])
    if start % width or stop % width:
        raise RuntimeError(
            f"{name}: this rank holds elements {start} to {stop} of {list(shape)}, expected whole "
            f"rows of {width} elements, as Megatron-FSDP cuts them"
        )
    return (start // width, stop // width)


def box_of_rows(shape: Sequence[int], first_row: int, num_rows: int) -> Box:
    """`num_rows` rows from `first_row` of a parameter of `shape`."""
    if not shape:
        return ()
    return ((first_row, first_row + num_rows), *full_box(shape[1:]))


def pieces_within(pieces: Iterable[Piece], held: Box) -> Iterator[Piece]:
    """What of `pieces` lies in the box `held` of the parameter.

    Local boxes count from the corner of `held`; what lies outside is left out.
    """
    for piece in pieces:
        shared = intersect(piece.local_box, held)
        if shared is None:
            continue
        inside = relative(shared, piece.local_box)
        checkpoint_box = tuple(
            (origin + start, origin + stop)
            for (origin, _), (start, stop) in zip(piece.checkpoint_box, inside, strict=True)
        )
        yield Piece(piece.tensor, checkpoint_box, relative(shared, held))
