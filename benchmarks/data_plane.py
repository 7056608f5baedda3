"""Cost of a step's samples for one of many ranks: bytes in and out, seconds of Python.

    python benchmarks/data_plane.py [--world-sizes 64 256 1024] [--quick]

One process simulates one rank. It runs mcore_rl's code on the samples of this rank's engine and the
table of all samples. Only the exchange is replaced: it receives zeros. The layout is that of
DeepSeek-V3: training with TP8 PP8, engines with TP8, a critic on the same ranks with TP8 PP4. There
are 64 samples per rank: 1,024 prompts of 16 samples on 256 ranks. Real processes then exchange
--gloo-megabytes over gloo, which measures the rate of this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from mcore_rl.batching.assignment import SampleFlops, division_of  # noqa: E402
from mcore_rl.batching.rows import MicroBatching  # noqa: E402
from mcore_rl.batching.sample_exchange import Division, RowExchange  # noqa: E402
from mcore_rl.batching.table import SampleTable, rows_to_tokens  # noqa: E402
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout  # noqa: E402
from mcore_rl.common import objects  # noqa: E402
from mcore_rl.model.layout import RolloutLayout, TrainLayout, pipeline_layers  # noqa: E402
from mcore_rl.moe.routing import RoutedLayers  # noqa: E402
from mcore_rl.rollout.sample_store import SampleStore  # noqa: E402
from mcore_rl.trainer.roles.samples import batch_by_plan, plan_epochs  # noqa: E402

SAMPLES_PER_PROMPT, SAMPLES_PER_RANK = 16, 64
PROMPT_TOKENS, MEDIAN_TOKENS, MOST_TOKENS = 512, 6_000, 32_768
NUM_LAYERS, FIRST_MOE_LAYER, TOPK, NUM_EXPERTS = 61, 3, 8, 256
# Of a forward pass: 37 billion weights a token; keys of 192 and values of 128 in 128 heads.
FLOPS = SampleFlops(per_token=2 * 37e9, per_token_pair=2.0 * 61 * 128 * (192 + 128) / 2)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Layouts and lengths of a simulated step."""

    train: TrainLayout
    critic: TrainLayout
    rollout: RolloutLayout
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray

    @classmethod
    def of(cls, world_size: int, samples_per_rank: int) -> Sizes:
        count = world_size * samples_per_rank
        rng = np.random.default_rng(0)
        long = rng.lognormal(np.log(MEDIAN_TOKENS), 0.8, count).astype(np.int64)
        prompts = rng.integers(64, 2 * PROMPT_TOKENS - 64, count // SAMPLES_PER_PROMPT)
        return cls(
            TrainLayout(world_size, tp_size=8, pp_size=8),
            TrainLayout(world_size, tp_size=8, pp_size=4),
            RolloutLayout(world_size, 8, expert_parallel=True),
            np.repeat(prompts, SAMPLES_PER_PROMPT),
            long.clip(1, MOST_TOKENS),
        )

    def scored(self, numbers: range) -> list[ScoredRollout]:
        """Return these samples, with arbitrary tokens."""
        found = []
        for number in numbers:
            length = int(self.response_lengths[number])
            prompt = Prompt(
                number // SAMPLES_PER_PROMPT,
                "",
                "",
                np.zeros(int(self.prompt_lengths[number]), dtype=np.int32),
            )
            rollout = Rollout(
                prompt=prompt,
                sample_index=number % SAMPLES_PER_PROMPT,
                text="",
                response_token_ids=np.arange(length, dtype=np.int32),
                rollout_log_probs=np.full(length, -0.5, dtype=np.float32),
                finish_reason="stop",
                weight_version=1,
            )
            found.append(ScoredRollout(rollout, float(number % 2), parts={"math": 1.0}))
        return found


class Rank:
    """Stand-in for the exchange that records its bytes, begin and end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.out_bytes = self.in_bytes = 0
        self.began = self.ended = 0.0

    def exchange(
        self, outgoing: Sequence[np.ndarray], incoming_bytes: Sequence[int]
    ) -> list[np.ndarray]:
        """Replace `objects.exchange`; concatenates, like the original."""
        sent = np.concatenate(outgoing)
        self.began = time.perf_counter()
        self.out_bytes = len(sent) - len(outgoing[self.rank])
        self.in_bytes = sum(incoming_bytes) - incoming_bytes[self.rank]
        received = np.zeros(sum(incoming_bytes), dtype=np.uint8)
        self.ended = time.perf_counter()
        return np.split(received, np.cumsum(incoming_bytes)[:-1])


@contextmanager
def timed(found: dict[str, float], name: str) -> Iterator[None]:
    """Record the seconds of a `with` block."""
    started = time.perf_counter()
    yield
    found[name] = time.perf_counter() - started


def simulate(world_size: int, samples_per_rank: int) -> dict[str, float]:
    """Simulate a step of one rank in the middle of the world."""
    rank = Rank(world_size // 2 + 3)
    dist.init_process_group("fake", rank=rank.rank, world_size=world_size, store=FakeStore())
    objects.exchange = rank.exchange  # type: ignore[assignment]
    sizes, found = Sizes.of(world_size, samples_per_rank), dict[str, float]()
    # Without experts.
    store = SampleStore(sizes.train, sizes.rollout, pipeline_layers(64, 8))
    table = joined_table(sizes, store, rank, found)
    batching = MicroBatching(
        max_tokens=MOST_TOKENS + 2 * PROMPT_TOKENS, count_multiple_of=1, cost=FLOPS
    )
    divisions, plans = {}, {}
    for name, layout in (("actor", sizes.train), ("critic", sizes.critic)):
        with timed(found, f"plan of the {name}"):
            plans[name] = plan_epochs(
                table, num_mini_batches=1, dp_size=layout.dp_size, batching=batching
            )
            divisions[name] = division_of(plans[name], table.lengths, layout.dp_ranks())
    # Tokens and log-probs to the actor.
    began = time.perf_counter()
    tokens = store.deliver(table, divisions["actor"].every)
    ended = time.perf_counter()
    found |= {"pack": rank.began - began, "unpack": ended - rank.ended}
    found |= {"out bytes": rank.out_bytes, "in bytes": rank.in_bytes}
    with timed(found, "batch"):
        batch = batch_by_plan(table, tokens, plans["actor"], sizes.train.dp_rank(rank.rank))
    del tokens
    with timed(found, "critic's tokens, values, returns"):
        exchange_with_critic(table, store, divisions, batch.num_tokens, rank, found)
    dist.destroy_process_group()
    # R3: one byte a choice and one a token, of a stage's layers with experts.
    moe_layers = NUM_LAYERS - FIRST_MOE_LAYER
    of_stage = RoutedLayers(tuple(range(-(-moe_layers // 8))), TOPK, NUM_EXPERTS)
    found["experts' in bytes"] = found["in bytes"] / 9 * (of_stage.bytes_a_token - 1)
    found |= {"ranks": world_size, "samples": len(table), "dp": sizes.train.dp_size}
    found["bytes of all tokens"] = 9 * int(table.lengths.sum())
    return found


def joined_table(
    sizes: Sizes, store: SampleStore, rank: Rank, found: dict[str, float]
) -> SampleTable:
    """Store this rank's samples, and return the table of all samples."""
    count, num_groups = len(sizes.response_lengths), sizes.rollout.num_tp_groups
    blocks = np.array_split(np.arange(count), num_groups)
    mine = blocks[sizes.rollout.tp_group_index(rank.rank)]
    scored = sizes.scored(range(mine[0], mine[-1] + 1))
    draws = (mine // SAMPLES_PER_PROMPT).tolist()
    with timed(found, "own table"):
        own = store.table(store.add(scored), draws)
        pickled = pickle.dumps(own)
    parts = [pickled] + [
        pickle.dumps(dataclasses.replace(own, homes=own.homes * 0 + 8 * group))
        for group in range(1, num_groups)
    ]
    found["table bytes"] = sum(len(part) for part in parts)
    with timed(found, "table of all"):
        table = SampleTable.joined([pickle.loads(part) for part in parts])
        table = table.take(np.argsort(table.draws, kind="stable"))
    # The joined table repeats this rank's samples: replace them by those of the complete step.
    return dataclasses.replace(
        table,
        homes=np.concatenate([np.full(len(block), 8 * g) for g, block in enumerate(blocks)]),
        numbers=np.concatenate([np.arange(len(block)) for block in blocks]),
        draws=np.arange(count) // SAMPLES_PER_PROMPT,
        prompt_lengths=sizes.prompt_lengths,
        response_lengths=sizes.response_lengths,
    )


def exchange_with_critic(
    table: SampleTable,
    store: SampleStore,
    divisions: Mapping[str, Division],
    num_tokens: int,
    rank: Rank,
    found: dict[str, float],
) -> None:
    """Move tokens to the critic, values from there, and returns to it."""
    values = torch.zeros(num_tokens).numpy()
    first = {name: division.first for name, division in divisions.items()}
    here = first["critic"].of(rank.rank)
    returns = np.zeros(int(table.lengths[here].sum()), dtype=np.float32)
    for exchange in (
        store.row_exchange(table, divisions["critic"].every),
        RowExchange(table.lengths, first["critic"], first["actor"], returns),
        RowExchange(table.lengths, first["actor"], first["critic"], values),
    ):
        came = exchange.moved(rank.rank, dist.get_world_size(), rank.exchange)
        if came.ndim == 2:
            rows_to_tokens(came, table.lengths[here])
        for way, num_bytes in (("out", rank.out_bytes), ("in", rank.in_bytes)):
            name = f"critic's {way} bytes"
            found[name] = found.get(name, 0) + num_bytes


def exchange_for_real(rank: int, world_size: int, folder: str, megabytes: int) -> None:
    """Exchange over gloo in one of several processes; the first one prints."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    each = (megabytes << 20) // (world_size - 1)
    counts = [0 if other == rank else each for other in range(world_size)]
    outgoing = [np.ones(count, dtype=np.uint8) for count in counts]
    seconds = []
    for _ in range(4):
        objects.barrier()
        started = time.perf_counter()
        objects.exchange(outgoing, counts)
        objects.barrier()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        rate = (megabytes << 20) / 1e6 / min(seconds[1:])
        print(
            f"| {world_size} | {megabytes} | {min(seconds[1:]):.2f} | {rate:.0f} | "
            f"{rate * world_size:.0f} |",
            flush=True,
        )
    objects.barrier()
    os._exit(0)  # gloo's threads may still run


ROWS = (
    ("samples of the step", "samples", "{:,.0f}"),
    ("DP ranks", "dp", "{:.0f}"),
    ("all tokens, with log-probs, MB (computed)", "bytes of all tokens", "MB"),
    ("tokens and log-probs in, MB", "in bytes", "MB"),
    ("tokens and log-probs out, MB", "out bytes", "MB"),
    ("experts of its stage in, with R3, MB (computed)", "experts' in bytes", "MB"),
    ("critic: tokens, values, returns in, MB", "critic's in bytes", "MB"),
    ("critic: tokens, values, returns out, MB", "critic's out bytes", "MB"),
    ("table of all samples in, MB", "table bytes", "MB"),
    ("its own part of the table made, s", "own table", "{:.3f}"),
    ("table of all read and joined, s", "table of all", "{:.3f}"),
    ("samples divided for the actor, s", "plan of the actor", "{:.2f}"),
    ("samples divided for the critic, s", "plan of the critic", "{:.2f}"),
    ("packed, s", "pack", "{:.2f}"),
    ("unpacked, s", "unpack", "{:.2f}"),
    ("made a batch, s", "batch", "{:.2f}"),
    (
        "critic: tokens, values, returns packed and unpacked, s",
        "critic's tokens, values, returns",
        "{:.2f}",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--gloo-megabytes", type=int, default=256, help="of each process")
    parser.add_argument("--quick", action="store_true", help="an eighth of the samples")
    options = parser.parse_args()
    samples = SAMPLES_PER_RANK // (8 if options.quick else 1)
    torch.set_num_threads(1)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    results = [simulate(world_size, samples) for world_size in options.world_sizes]
    print("| of one rank | " + " | ".join(f"{each['ranks']} ranks" for each in results) + " |")
    print("| --- |" + " ---: |" * len(results))
    for title, name, form in ROWS:
        cells = [
            f"{each[name] / 1e6:,.1f}" if form == "MB" else form.format(each[name])
            for each in results
        ]
        print(f"| {title} | " + " | ".join(cells) + " |")
    print("\n| processes | MB out and in of each | seconds | MB/s of each | MB/s together |")
    print("| ---: | ---: | ---: | ---: | ---: |", flush=True)
    for world_size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world_size, folder, options.gloo_megabytes)
            multiprocessing.spawn(exchange_for_real, arguments, nprocs=world_size)


if __name__ == "__main__":
    main()
