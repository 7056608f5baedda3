"""What of a GPU's memory a CPU can show: a sleeping engine's is gone, and training's is away while
an engine starts.

On CUDA a sleeping engine's weights and KV cache have no memory behind them: reading them ends the
process, and what comes back holds anything. That is all that was made while the model was loaded,
be it a parameter or what a layer or kernel keeps beside; vLLM brings back buffers alone. Here, on
CPU, the same tensors' storages are emptied, which ends the process that reads one as well (some
operations raise), and refilled with what is a nan in every dtype of a weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mcore_rl.hybrid_engine.memory import usage
from mcore_rl.hybrid_engine.memory.offload import Offloader
from mcore_rl.hybrid_engine.vllm import in_process_engine as vllm_engine
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.megatron.rng import RngState
from tests.allocations import Allocations

Gone = list[tuple[torch.UntypedStorage, torch.Tensor | int]]  # and its bytes, or how many


class SleepLog:
    """What was seen of all engines."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_gone = {"weights": 0, "kv_cache": 0}  # bytes, at the last sleep


@contextmanager
def memory_gone_while_asleep() -> Iterator[SleepLog]:
    """In which it is as on CUDA, for every engine of this process."""
    from vllm.v1.worker.gpu_worker import Worker

    log = SleepLog()
    gone: dict[str, Gone] = {}
    made: list[StorageWeakRef] = []  # while models were loaded
    load_model = Worker.load_model
    free, allocate, give_back = (
        VLLMEngine._free,
        VLLMEngine._allocate,
        usage.give_back_cached,
    )
    reload = VLLMEngine.reload

    def freed(engine: VLLMEngine, keep_weights: bool) -> None:
        assert made, "the engine was started before"
        free(engine, keep_weights)
        log.events.append("sleep")
        # First: layers point to it, too.
        gone["kv_cache"] = list(_emptied(engine._worker.model_runner.kv_caches, keep=False))
        buffers = [buffer for each in _models(engine) for buffer in each.buffers()]
        gone["weights"] = list(_emptied(buffers, keep=True))
        gone["weights"] += _emptied(_alive(made), keep_weights)
        for what, storages in gone.items():
            sizes = [size if isinstance(size, int) else len(size) for _, size in storages]
            log.num_gone[what] = sum(sizes)

    def loaded(worker: Any, **options: Any) -> None:
        with Allocations(lambda storage: made.append(StorageWeakRef(storage))):
            load_model(worker, **options)

    def allocated(engine: VLLMEngine, what: str) -> None:
        allocate(engine, what)
        log.events.append(f"allocate {what}")
        for storage, content in gone.pop(what):
            storage.resize_(content if isinstance(content, int) else len(content))
            if not isinstance(content, int):
                _bytes_of(storage).copy_(content)
            elif what == "weights":  # pages of a KV cache that nobody has touched cost nothing
                _bytes_of(storage).fill_(0xFF)

    def reloaded(engine: VLLMEngine, *args: Any, **options: Any) -> None:
        log.events.append("reload")
        reload(engine, *args, **options)

    def given_back() -> None:
        log.events.append("give back")
        give_back()

    with (
        mock.patch.object(Worker, "load_model", loaded),
        mock.patch.object(VLLMEngine, "_free", freed),
        mock.patch.object(VLLMEngine, "_allocate", allocated),
        mock.patch.object(VLLMEngine, "reload", reloaded),
        mock.patch.object(vllm_engine, "give_back_cached", given_back),
    ):
        yield log


def _models(engine: VLLMEngine) -> list[torch.nn.Module]:
    return [engine.model] if engine.drafter is None else [engine.model, engine.drafter]


def _alive(storages: Iterable[StorageWeakRef]) -> Iterator[torch.Tensor]:
    """Those that something still holds, as tensors of bytes."""
    for weak in storages:
        storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        if storage is not None:
            yield _bytes_of(storage)


def _emptied(values: Iterable[Any], keep: bool) -> Iterator[tuple[torch.UntypedStorage, Any]]:
    for value in values:
        if not torch.is_tensor(value) or type(value.detach()) is not torch.Tensor:
            continue
        storage = value.untyped_storage()
        num_bytes = storage.nbytes()
        if num_bytes and storage.resizable():
            yield storage, _bytes_of(storage).clone() if keep else num_bytes
            storage.resize_(0)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@contextmanager
def starts_watched() -> Iterator[list[dict[str, Any]]]:
    """Yields what is seen of each start of an engine, of training's state on this rank.

    `before` and `while_starting` are bytes of storages by kind; `same_state` whether parameters and
    optimizer state, and `same_draws` whether all generators, are the same bits afterwards.
    """
    seen: list[dict[str, Any]] = []
    away, start = Offloader.all_offloaded, VLLMEngine._start
    inside: list[Offloader] = []

    @contextmanager
    def watched(offloader: Offloader) -> Iterator[None]:
        state, draws = _state(offloader), RngState.capture().to_tensors()
        found: dict[str, Any] = {"before": _sizes(offloader)}
        with away(offloader):
            inside.append(offloader)
            seen.append(found)
            yield
            inside.pop()
        now = RngState.capture().to_tensors()
        found["same_state"] = _state(offloader) == state
        found["same_draws"] = all(torch.equal(now[name], draws[name]) for name in draws)
        found["num_tensors"] = len(state)

    def started(engine: VLLMEngine) -> None:
        if inside:
            seen[-1]["while_starting"] = _sizes(inside[-1])
        else:
            seen.append({"while_starting": None})
        start(engine)

    with (
        mock.patch.object(Offloader, "all_offloaded", watched),
        mock.patch.object(VLLMEngine, "_start", started),
    ):
        yield seen


def _sizes(offloader: Offloader) -> dict[str, int]:
    found: dict[str, int] = {}
    counted: set[int] = set()
    for kind, tensors in offloader._find().items():
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for _, t in tensors}
        found[kind] = sum(s.nbytes() for key, s in storages.items() if key not in counted)
        counted |= storages.keys()
    return found


def _state(offloader: Offloader) -> dict[str, str]:
    return digests(offloader._find(), ("parameters", "optimizer"))


def digests(
    tensors: Mapping[str, Iterable[tuple[str, torch.Tensor]]], kinds: Iterable[str]
) -> dict[str, str]:
    """Digests of the tensors of `kinds` that have memory, as `train_tensors` names them."""
    return {
        f"{kind} {index} {name}": digest(tensor)
        for kind in kinds
        for index, (name, tensor) in enumerate(tensors[kind])
        if tensor.untyped_storage().nbytes()  # Megatron-FSDP has given up what it has not gathered
    }


def digest(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's elements."""
    # Of a copy: memory that numpy has once seen torch resizes no more.
    data = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return hashlib.sha256(data.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
