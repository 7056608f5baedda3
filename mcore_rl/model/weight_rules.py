"""Rules that map a Megatron parameter to slices of Hugging Face tensors.

A rule takes a parameter of one rank and returns its pieces: a box of a checkpoint tensor equals a
box of the local parameter. `weight_map` has the table of which parameter follows which rule.

Shape legend: o output rows of a weight, i input columns, v vocabulary, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mcore_rl.model.boxes import Box, full_box
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.delta_net import Rows
from mcore_rl.model.families import family_of


@dataclass(frozen=True, slots=True)
class Piece:
    """Equal boxes: `checkpoint_tensor[checkpoint_box]` is `parameter[local_box]`, of one shape.

    Example: `Piece("lm_head.weight", ((64, 128), (0, 32)), ((0, 64), (0, 32)))` on TP rank 1.
    """

    tensor: str
    checkpoint_box: Box
    local_box: Box


@dataclass(frozen=True, slots=True)
class Parameter:
    """Local parameter, as passed to a rule."""

    name: str
    shape: tuple[int, ...]
    prefix: str  # of its checkpoint tensors: "", "model.layers.7." or that of a routed expert
    rank: int  # in the group that splits this parameter: TP, or ETP for routed experts
    size: int


Rule = Callable[[Parameter], list[Piece]]


def _rows(tensor: str, shape: Sequence[int], start: int, local_start: int, count: int) -> Piece:
    """Map `count` checkpoint rows from `start` to parameter rows from `local_start`."""
    rest = full_box(shape[1:])
    return Piece(
        tensor,
        ((start, start + count), *rest),
        ((local_start, local_start + count), *rest),
    )


def replicated(name: str) -> Rule:
    """Return a rule for a replicated tensor: every rank holds all of it."""

    def rule(p: Parameter) -> list[Piece]:
        box = full_box(p.shape)
        return [Piece(p.prefix + name, box, box)]

    return rule


def column(name: str) -> Rule:
    """Return a rule for split rows: rank r holds rows r*o .. (r+1)*o of the checkpoint."""

    def rule(p: Parameter) -> list[Piece]:
        return [_rows(p.prefix + name, p.shape, p.rank * p.shape[0], 0, p.shape[0])]

    return rule


def row(name: str) -> Rule:
    """Return a rule for split columns: rank r holds columns r*i .. (r+1)*i of the checkpoint."""

    def rule(p: Parameter) -> list[Piece]:
        out, width = p.shape
        first = p.rank * width
        return [Piece(p.prefix + name, ((0, out), (first, first + width)), full_box(p.shape))]

    return rule


def stacked(*parts: tuple[str, int]) -> Rule:
    """Return a rule for stacked tensors `(name, rows)`: all rows, or this rank's rows, of each."""

    def rule(p: Parameter) -> list[Piece]:
        is_whole = p.shape[0] == sum(size for _, size in parts)
        pieces, local = [], 0
        for name, size in parts:
            count = size if is_whole else size // p.size
            first = 0 if is_whole else p.rank * count
            pieces.append(_rows(p.prefix + name, p.shape, first, local, count))
            local += count
        assert local == p.shape[0], (p.name, p.shape)
        return pieces

    return rule


def listed(rows: Callable[[int, int], Iterable[Rows]]) -> Rule:
    """Return a rule for rows of several tensors in the order that `rows(rank, size)` lists."""

    def rule(p: Parameter) -> list[Piece]:
        pieces, local = [], 0
        for part in rows(p.rank, p.size):
            pieces.append(_rows(p.prefix + part.tensor, p.shape, part.first, local, part.count))
            local += part.count
        assert local == p.shape[0], (p.name, p.shape)
        return pieces

    return rule


def gate_and_up(gate: str, up: str) -> Rule:
    """Return a rule for SwiGLU's first layer: this rank's gate rows, then its up rows."""

    def rule(p: Parameter) -> list[Piece]:
        half = p.shape[0] // 2
        first = p.rank * half
        return [
            _rows(p.prefix + gate, p.shape, first, 0, half),
            _rows(p.prefix + up, p.shape, first, half, half),
        ]

    return rule


def qkv(kind: str, shape: ModelShape) -> Rule:
    """Return a rule for Megatron's interleaving: [query heads, key, value] per key/value group.

    With an output gate it is [query heads, gates, key, value], and q_proj has [query, gate] per
    head."""
    head, heads = shape.head_dim, shape.num_heads // shape.num_kv_heads
    at = family_of(shape.architecture).names.attention

    def rows_of(name: str, first: int, count: int) -> Rows:
        return Rows(f"{at}{name}_proj.{kind}", first, count)

    def rows(rank: int, size: int) -> Iterator[Rows]:
        groups = shape.num_kv_heads // size
        for group in range(rank * groups, (rank + 1) * groups):
            if shape.output_gate:
                for is_gate in range(2):
                    for nth in range(group * heads, (group + 1) * heads):
                        yield rows_of("q", (2 * nth + is_gate) * head, head)
            else:
                yield rows_of("q", group * heads * head, heads * head)
            yield rows_of("k", group * head, head)
            yield rows_of("v", group * head, head)

    return listed(rows)


def norm_of_heads(name: str, width: int) -> Rule:
    """Return a rule for query or key norms, which are replicated.

    It raises for another width: a fork's spec may norm each head instead of all heads together."""

    def rule(p: Parameter) -> list[Piece]:
        if p.shape != (width,):
            raise RuntimeError(
                f"{p.name} has shape {list(p.shape)} and {name} in the checkpoint [{width}]: the "
                "model was built with other norms of queries and keys"
            )
        return replicated(name)(p)

    return rule


def vocabulary(name: str, vocab_size: int) -> Rule:
    """Return a rule for split rows of the padded vocabulary; padding rows have no counterpart."""

    def rule(p: Parameter) -> list[Piece]:
        rows = p.shape[0]
        first = p.rank * rows
        real = min(rows, vocab_size - first)
        return [_rows(name, p.shape, first, 0, real)] if real > 0 else []

    return rule
