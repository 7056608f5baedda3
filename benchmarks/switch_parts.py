"""A file for --rl-import: times of a run's switches, compared with a copy on the device.

    python benchmarks/switch_parts.py FOLDER      prints medians of a run's measurements

MCORE_RL_SWITCH_PARTS names a folder, which gets `RANK.jsonl` with a line for every hand-over:
seconds of its parts, synchronised with the device; W' (`resident_bytes`, needed by this rank's
engine); received bytes; and the bytes per second of copies within device memory (without CUDA
within host memory), measured in the same process right after it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

PARTS = ("wake_weights", "reload", "wake_kv_cache", "sleep")  # methods of VLLMEngine
MOST_COPIED_BYTES = 512 << 20
NUM_COPIES = 10


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def copy_bytes_per_second(num_bytes: int) -> float:
    """Return the rate of the fastest of several copies of `num_bytes`, or of what fits."""
    import torch

    device = "cpu"
    if torch.cuda.is_available():
        device, free = "cuda", torch.cuda.mem_get_info()[0]
        num_bytes = min(num_bytes, free // 4)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = []
    for _ in range(NUM_COPIES):
        synchronize()
        started = time.perf_counter()
        target.copy_(source)
        synchronize()
        seconds.append(time.perf_counter() - started)
    del source, target
    if device == "cuda":
        torch.cuda.empty_cache()  # the engine takes its memory from the driver
    return num_bytes / min(seconds)


class Watch:
    """Recorder of this rank's hand-overs: times the engine's methods, writes a line for each."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{os.environ.get('RANK', '0')}.jsonl"
        self._seconds: dict[str, float] = {}

    def timed(self, owner: type, name: str) -> None:
        """Time the calls of a method."""
        real = getattr(owner, name)

        def timing(*args: Any, **keywords: Any) -> Any:
            synchronize()
            started = time.perf_counter()
            try:
                return real(*args, **keywords)
            finally:
                synchronize()
                self._seconds[name] = time.perf_counter() - started

        setattr(owner, name, timing)

    def ended(self, manager: Any, report: Any) -> None:
        """Handle the end of either direction; the switch to training completes a line."""
        if report.direction == "train_to_rollout":
            self._report = report
            return
        stream = manager.stream
        resident = sum(
            stream.tensors[name].itemsize * _volume(box)
            for name, boxes in stream.need.items()
            for box in boxes
        )
        line = {
            "seconds": self._report.duration_seconds,
            "received_bytes": self._report.received_bytes,
            "peak_extra_bytes": self._report.peak_extra_bytes,
            "resident_bytes": resident,
            "back_seconds": report.duration_seconds,
            **{f"{name}_seconds": self._seconds[name] for name in PARTS},
            "copy_bytes_per_second": copy_bytes_per_second(min(resident, MOST_COPIED_BYTES)),
        }
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _volume(box: Any) -> int:
    size = 1
    for start, stop in box:
        size *= stop - start
    return size


def watch(folder: Path) -> None:
    """Watch the engine and the manager of this process."""
    from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager as Manager
    from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine

    watcher = Watch(folder)
    for name in PARTS:
        watcher.timed(VLLMEngine, name)
    init = Manager.__init__

    def initialised(self: Any, *args: Any, **keywords: Any) -> None:
        init(self, *args, **keywords)
        self.on_reshard_end.append(lambda report: watcher.ended(self, report))

    Manager.__init__ = initialised  # type: ignore[method-assign]


def medians(folder: Path) -> dict[str, float]:
    """Return medians over all switches but the first, which connects, of the slowest ranks."""
    ranks = [
        [json.loads(line) for line in file.read_text().splitlines()][1:]
        for file in sorted(folder.glob("*.jsonl"))
    ]
    switches = list(zip(*ranks, strict=True))
    found = {
        name: statistics.median(max(rank[name] for rank in switch) for switch in switches)
        for name in switches[0][0]
    }
    copy_seconds = found["resident_bytes"] / found["copy_bytes_per_second"]
    found["copy_over_switch"] = copy_seconds / found["seconds"]
    found["copy_over_reload"] = copy_seconds / found["reload_seconds"]
    return found


if __name__ == "__main__":
    print(", ".join(f"{name} {value:.4g}" for name, value in medians(Path(sys.argv[1])).items()))
elif "RANK" in os.environ:  # not in the workers of rewards, which import this as well
    watch(Path(os.environ["MCORE_RL_SWITCH_PARTS"]))
