"""How samples are cut over context-parallel ranks: as Megatron and Transformer Engine cut them.

Megatron runs in a process of its own, because its repairs stay applied. Transformer Engine's kernel
needs a GPU, so that its index is written down here.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.batching.rows import positions_on_cp_rank
from mcore_rl.common.errors import UsageError
from mcore_rl.flags.parsed_flags import given_values
from tests.rank_pool import RankPool

SETUP = """
from mcore_rl.megatron import adapter as megatron_adapter
import torch
from megatron.core import utils
from megatron.core.models.common.embeddings import rope_utils
from mcore_rl.batching.rows import MicroBatching
from mcore_rl.batching.rows import lay_out
from mcore_rl.batching.train_batches import batch_of_tokens, take


class Group:
    def __init__(self, size, rank):
        self.size, self.rank = lambda: size, lambda: rank


def rows_of(cp_size, packed):
    batch = batch_of_tokens([[7] * 3, [8] * 12, [9], [5] * 20])
    together = take(batch, (((0, 1, 2, 3),),))
    batching = MicroBatching(max_tokens=1000 if packed else 0, cp_size=cp_size)
    return [lay_out(together, batching, 48 * cp_size, rank) for rank in range(cp_size)]
"""
PADDED_ROWS = """
# Its own cut of a batch; groups are asked for their size and rank by torch.distributed.
utils.torch.distributed.get_world_size = lambda group: group.size()
utils.torch.distributed.get_rank = lambda group: group.rank()
for cp_size in (2, 3, 4):
    batch = batch_of_tokens([[7] * 3, [8] * 12, [9], [5] * 20])
    whole = lay_out(take(batch, (((0, 1, 2, 3),),)), MicroBatching(), 48 * cp_size)
    for rank, rows in enumerate(rows_of(cp_size, packed=False)):
        names = ("token_ids", "position_ids", "target_ids")
        theirs = utils.get_batch_on_this_cp_rank(
            {name: getattr(whole, name) for name in names},
            is_hybrid_cp=False,
            cp_group=Group(cp_size, rank),
        )
        for name in names:
            assert torch.equal(getattr(rows, name), theirs[name]), (cp_size, rank, name)
"""
POSITIONS = """
# A rotation's frequencies, of which number n speaks of position n.
for cp_size in (2, 3, 4):
    for rank in range(cp_size):
        rows = rows_of(cp_size, packed=False)[rank]
        every = torch.arange(48.0 * cp_size, device=rope_utils.torch.cuda.current_device())
        cut = rope_utils.get_pos_emb_on_this_cp_rank(every, 0, Group(cp_size, rank)).cpu()
        assert all(torch.equal(row.float(), cut) for row in rows.position_ids)

        rows = rows_of(cp_size, packed=True)[rank]
        lengths = (rows.cu_seqlens.diff() // cp_size).tolist()
        parts = [
            rope_utils._get_thd_freqs_on_this_cp_rank(rank, cp_size, torch.empty(length), every)
            for length in lengths
        ]
        assert torch.equal(rows.position_ids[0].float(), torch.cat(parts).cpu())
"""
# What the fused rotation of latent attention reads, beside what the unfused one computes with.
YARN_CACHE = """
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

for cp_size in (1, 2, 3, 4):
    for rank in range(cp_size):
        group = Group(cp_size, rank)
        rope = YarnRotaryEmbedding(
            8, scaling_factor=4.0, original_max_position_embeddings=256, cp_group=group
        )
        for packed in (False, True, False):
            for length in (48, 24, 480, 96, 48):
                cos, sin = rope.get_cached_cos_sin(length, packed_seq=packed)
                angles, scale = rope(length, packed_seq=packed)
                assert len(cos) == (length if packed else length // cp_size)
                assert torch.equal(cos, angles.cos() * scale)
                assert torch.equal(sin, angles.sin() * scale)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [PADDED_ROWS, POSITIONS, YARN_CACHE], ids=["rows", "positions", "yarn"]
)
def test_rows_are_cut_and_rotated_as_megatron_does(code: str, ranks: RankPool) -> None:
    ranks.run("tests.rank_pool:execute", world_size=1, code=SETUP + code)


def test_attention_backend_without_context_parallelism_is_refused() -> None:
    from mcore_rl.job import preflight
    from mcore_rl.job.reading import make_parser

    parser = make_parser()

    def values(*tokens: str) -> dict[str, object]:
        return given_values(["--attention-backend", "unfused", *tokens], parser)

    preflight.check_together(values())
    preflight.check_together(values("--context-parallel-size", "2", "--transformer-impl", "local"))
    with pytest.raises(UsageError, match="size 2 is .* unfused; give flash or fused, or"):
        preflight.check_together(values("--context-parallel-size", "2"))


def engine_index(token: int, bounds: list[int], cp_size: int, cp_rank: int) -> int:
    """Transformer Engine's thd_partition_src_index (common/fused_attn/context_parallel.cu)."""
    shares = [bound // cp_size for bound in bounds]
    sample = max(i for i, start in enumerate(shares[:-1]) if start <= token)
    length = shares[sample + 1] - shares[sample]
    index = token - shares[sample]
    offset = cp_rank if index < length // 2 else (cp_size - 1) * 2 - cp_rank
    return index + shares[sample] * cp_size + length // 2 * offset


@given(chunks=st.lists(st.integers(1, 5), min_size=1, max_size=6), cp_size=st.integers(2, 5))
def test_packed_rows_are_cut_as_transformer_engine_cuts_them(
    chunks: list[int], cp_size: int
) -> None:
    bounds = [0, *itertools.accumulate(2 * cp_size * size for size in chunks)]
    share = bounds[-1] // cp_size
    for rank in range(cp_size):
        ours = positions_on_cp_rank(torch.tensor(bounds), share, cp_size=cp_size, cp_rank=rank)
        theirs = [engine_index(token, bounds, cp_size, rank) for token in range(share)]
        assert ours.tolist() == theirs
