"""What the process of test_rollout_servers.py does: two vLLM servers as one engine.

The servers are `vllm serve` itself, in processes of their own; an engine in this process has the
same weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch.distributed as dist
from transformers import AutoTokenizer

from mcore_rl.common.http import client_session
from mcore_rl.data.tokenizer import ends_of
from mcore_rl.hybrid_engine.remote.engine_client import HTTPEngineClient
from mcore_rl.hybrid_engine.remote.generate_client import GenerateClient, OtherVersion, Received
from mcore_rl.hybrid_engine.remote.server_engine import ServerEngine, ServersConfig
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling, seed_of
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.moe.routing import RoutedLayers
from tests.engine_samples import small_engine
from tests.vllm_servers import VLLMServer, running, until

MAX_LEN = 512
LONG_TOKENS = 300
REST_SECONDS = 0.01
HANG_SECONDS = 15.0
NUM_TOP = 4
SAMPLINGS = [
    Sampling(temperature=0.0, ignore_eos=True),
    Sampling(ignore_eos=True),
    Sampling(temperature=0.7, top_p=0.9, ignore_eos=True),
    Sampling(temperature=1.3, top_k=5, ignore_eos=True),
    Sampling(),
]


def play(checkpoint: str, vocab_size: int) -> dict[str, Any]:
    with running(checkpoint, 2, max_len=MAX_LEN, rest_seconds=REST_SECONDS) as servers:
        return _play(checkpoint, vocab_size, servers)


def _play(checkpoint: str, vocab_size: int, servers: list[VLLMServer]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    local = VLLMEngine(small_engine(checkpoint, max_model_len=MAX_LEN))
    urls = tuple(each.url for each in servers)
    # Requests find a killed server, not a probe.
    config = ServersConfig(
        urls, seqs_per_server=16, vocab_size=vocab_size, probe_interval_seconds=3600
    )
    config_r3 = ServersConfig(
        urls, seqs_per_server=16, vocab_size=vocab_size, routed_layers=RoutedLayers((0,), 1, 2)
    )
    engine = ServerEngine(config, AutoTokenizer.from_pretrained(checkpoint))
    engine_r3 = ServerEngine(config_r3, engine.tokenizer)
    try:
        for each in (engine, engine_r3):
            until(lambda each=each: len(each.returned) == 2)
        for url in urls:
            answer = requests.post(
                f"{url}/update_weight_version", json={"new_version": "1"}, timeout=60
            )
            assert answer.ok, answer.text
        for each in (engine, engine_r3):
            each.begin_update()
            each.admit(dict.fromkeys(urls, 16), 1)
        found = {
            "alone": [same(local, engine, request) for request in short_requests(local)],
            "other version": asyncio.run(_other_version(urls[0], vocab_size)),
            "r3": _without_experts(engine_r3),
            "ends": ends(checkpoint, urls[0]),
        }
        found["cut"] = cut(local, engine, urls)
        patience = {"token_timeout_seconds": HANG_SECONDS, "probe_timeout_seconds": HANG_SECONDS}
        impatient = ServerEngine(
            replace(config, probe_interval_seconds=1, **patience), engine.tokenizer
        )
        try:
            found["hung"] = hung(local, impatient, urls, servers[0])
        finally:
            impatient.close()
        found["killed"] = killed(local, engine, urls, servers[0])
        return found
    finally:
        engine.close()
        engine_r3.close()
        local.close()


def short_requests(local: VLLMEngine) -> list[Request]:
    """One of each sampling, and one with a stop text that occurs, across a cut, too. Those that
    sample all tokens have candidates."""
    found = [
        Request(n, np.arange(5 + n, 25 + 3 * n, dtype=np.int32), 24, each, seed=seed_of(7, n))
        for n, each in enumerate(SAMPLINGS)
    ]
    found = [
        replace(each, num_top=NUM_TOP)
        if each.sampling.top_p == 1.0 and each.sampling.top_k == -1
        else each
        for each in found
    ]
    (whole,) = run(local, [found[0]])
    texts = [local.tokenizer.decode(whole.token_ids[:n].tolist()) for n in range(25)]
    stop = texts[10][len(texts[7]) :]  # three tokens
    stopping = replace(found[0], number=10, sampling=replace(SAMPLINGS[0], stop=(stop,)))
    own = np.concatenate([found[0].token_ids, whole.token_ids[:8]])
    rest = Request(11, own, 16, stopping.sampling, num_own=8)
    return [*found, stopping, rest]


def run(engine: VLLMEngine | ServerEngine, requests: Sequence[Request]) -> list[Completion]:
    found: dict[int, Completion] = {}
    with engine.generation() as generation:
        for request in requests:
            generation.submit(request)
        while generation.num_running:
            found |= {each.number: each for each in generation.step()}
    return [found[request.number] for request in requests]


def same(local: VLLMEngine, engine: ServerEngine, request: Request) -> dict[str, Any]:
    """A request alone in both, so that batches are the same."""
    (ours,), (theirs,) = run(local, [request]), run(engine, [request])
    return {
        "tokens": [ours.token_ids.tolist(), theirs.token_ids.tolist()],
        "log_probs": [ours.log_probs.tolist(), theirs.log_probs.tolist()],
        "reasons": [ours.finish_reason, theirs.finish_reason],
        "candidates": [
            None if top is None else (top.ids.tolist(), top.log_probs.tolist())
            for top in (ours.top_tokens, theirs.top_tokens)
        ],
    }


def certain(candidates: tuple[list[list[int]], list[list[float]]]) -> list[list[tuple]]:
    """The candidates of each position that are more probable than the last: equals of that one may
    be left out, and equals come in any order, as they were found among 4 or 5."""
    return [
        sorted(pair for pair in zip(values, ids, strict=True) if pair[0] > values[-1])
        for ids, values in zip(*candidates, strict=True)
    ]


def ends(checkpoint: str, url: str) -> list[tuple[bool, bool | None]]:
    """Whether a response ends at a token by the files, and on the server."""
    named = ends_of(Path(checkpoint), trust_remote_code=False)
    client = HTTPEngineClient(url)
    assert client.generates_tokens()
    return [(token in named, client.ends_at(token)) for token in (*named, 5, 6)]


async def _other_version(url: str, vocab_size: int) -> bool:
    async with client_session({}) as session:
        client = GenerateClient(session, url, vocab_size=vocab_size, token_timeout_seconds=60)
        request = Request(0, np.arange(5, 9, dtype=np.int32), 3, Sampling())
        await client.generate(request, Received(), 1)
        try:
            await client.generate(request, Received(), 2)
        except OtherVersion:
            return True
        return False


def _without_experts(engine: ServerEngine) -> str | None:
    request = Request(0, np.arange(5, 9, dtype=np.int32), 3, Sampling(), with_routes=True)
    with engine.giving_up():
        return run(engine, [request])[0].failure


def long_requests() -> list[Request]:
    sampling = Sampling(ignore_eos=True)
    return [
        Request(n, np.arange(5 + n, 30, dtype=np.int32), LONG_TOKENS, sampling, seed=seed_of(8, n))
        for n in range(20)
    ]


def scored(local: VLLMEngine, completions: Sequence[Completion]) -> dict[str, Any]:
    """Differences of log-probs to those of the engine in this process, teacher-forced."""
    sequences = [[*c.request.token_ids, *c.token_ids] for c in completions]
    differences = [
        np.abs(log_probs[-len(c.token_ids) :] - c.log_probs)
        for c, log_probs in zip(completions, local.prompt_log_probs(sequences), strict=True)
    ]
    return {
        "num_tokens": [len(c.token_ids) for c in completions],
        "reasons": sorted({c.finish_reason for c in completions}),
        "failures": [c.failure for c in completions if c.failure is not None],
        "mean": float(np.concatenate(differences).mean()),
        "most": float(np.concatenate(differences).max()),
    }


def cut(local: VLLMEngine, engine: ServerEngine, urls: Sequence[str]) -> dict[str, Any]:
    """End requests in the middle, and wait until the servers have aborted them."""
    requests_, found = long_requests(), []
    with engine.generation() as generation:
        for request in requests_:
            generation.submit(request)
        until(lambda: all(run.num_tokens >= 5 for run in generation._running.values()))
        generation.end_soon([request.number for request in requests_])
        while generation.num_running:
            found += generation.step()
    until(lambda: not any(map(num_running, urls)))
    return scored(local, found) | {"metrics": engine.take_metrics()}


def num_running(url: str) -> float:
    lines = requests.get(f"{url}/metrics", timeout=60).text.splitlines()
    running = [line for line in lines if line.startswith("vllm:num_requests_running")]
    assert running
    return sum(float(line.split()[-1]) for line in running)


def hung(
    local: VLLMEngine, engine: ServerEngine, urls: Sequence[str], first: VLLMServer
) -> dict[str, Any]:
    """Stop a server while it samples, and let it continue once its requests have finished."""
    requests_, found = long_requests(), []
    until(lambda: len(engine.returned) == 2)
    engine.admit(dict.fromkeys(urls, 16), 1)
    with engine.generation() as generation:
        for request in requests_:
            generation.submit(request)
        until(lambda: all(run.num_tokens >= 5 for run in generation._running.values()))
        with first.hanging():
            while generation.num_running:
                found += generation.step()
            admitted = list(engine.admitted)
    facts = {"admitted": admitted, "metrics": engine.take_metrics()}
    patient, hasty = HTTPEngineClient(first.url, 60), HTTPEngineClient(first.url, 1)
    patient.require_workers()
    with first.hanging(answers_probes=True):
        patient.require_health()
        with pytest.raises(RuntimeError) as silent:
            hasty.require_workers()
    facts["workers"] = str(silent.value)
    until(lambda: list(engine.returned) == [urls[0]])
    engine.begin_update()
    engine.admit({urls[0]: 16}, 1)
    facts["after"] = [len(each.token_ids) for each in run(engine, requests_[:4])]
    return scored(local, found) | facts


def killed(
    local: VLLMEngine,
    engine: ServerEngine,
    urls: Sequence[str],
    first: VLLMServer,
) -> dict[str, Any]:
    """Kill a server while it samples."""
    requests_, found = long_requests(), []
    with engine.generation() as generation:
        for request in requests_:
            generation.submit(request)
        until(lambda: all(run.num_tokens >= 5 for run in generation._running.values()))
        on_first = [
            run.num_tokens
            for run in generation._running.values()
            if run.server is not None and run.server.url == urls[0]
        ]
        first.kill()
        while generation.num_running:
            found += generation.step()
    metrics = engine.take_metrics()
    facts = {"on_first": on_first, "metrics": metrics, "admitted": list(engine.admitted)}
    return scored(local, found) | facts
