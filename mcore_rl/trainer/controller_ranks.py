"""Controllers of `--rl-rollout-servers`: what these processes do while the actor's ranks train.

    the actor's ranks (`servers`)                     a controller

    begin_update ── message ────────────────────────► running requests end; answers with the servers
                 ── weights to the servers alone        that all controllers reach
    admit ── message ───────────────────────────────► these servers get requests
    collect ── message ─────────────────────────────► requests to the servers, rewards

Each controller has a share of the groups, and sends requests to all servers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.hybrid_engine.remote.server_engine import ServerEngine, ServersConfig
from mcore_rl.moe.routing import R3
from mcore_rl.observe.timeline import IDLE, UPDATE
from mcore_rl.rollout.sampler import Collected
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.sampling import Start
from mcore_rl.trainer.sampling_ranks import SamplingRanks, serve_sampling

NAME = "controllers"


class Wait:
    """The seconds of waits, since the last `forget`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 0.0  # of waits that have ended
        self._since: float | None = None  # of the one that continues

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else self._clock() - self._since)

    def begin(self) -> None:
        """Begin to wait, or continue."""
        if self._since is None:
            self._since = self._clock()

    def end(self) -> None:
        self._seconds, self._since = self.seconds, None

    def forget(self) -> None:
        """Count from now on."""
        self._seconds = 0.0
        if self._since is not None:
            self._since = self._clock()


class ControllerRanks(SamplingRanks):
    """Servers as one engine of each controller; the weights come without its help."""

    _engine: ServerEngine

    def __init__(self, job: Job, log: TextIO | None, start: Start) -> None:
        super().__init__(job, _server_engine(job), start, log)
        self._wait = Wait(time.monotonic)

    def begin_update(self) -> dict[str, Any]:
        """Stop sampling, before the weights change. Returns the servers that all controllers can
        reach, for how long the trainers have waited for samples since the last token, and why
        servers were excluded."""
        self._sampler.pause()
        self._activity.begin(UPDATE)
        reached = objects.all_gather(self._engine.begin_update())
        if objects.on_any(self._engine.has_sampled):
            self._wait.forget()
        self._wait.begin()
        waited = objects.all_gather((self._wait.seconds, self._engine.faults))
        by_all = set(reached[0]).intersection(*reached[1:])
        return {
            "urls": [url for url in reached[0] if url in by_all],
            "seconds": max(seconds for seconds, _ in waited),
            "faults": {url: why for _, faults in waited for url, why in faults.items()},
        }

    def admit(self, *, capacities: dict[str, int], weight_version: int) -> None:
        """Send requests to these servers: they hold attested weights of this version. Each runs so
        many requests at a time, of all controllers together."""
        num_controllers = dist.get_world_size()
        shares = {url: max(1, most // num_controllers) for url, most in capacities.items()}
        self._engine.admit(shares, weight_version)
        self._activity.begin(IDLE)

    def sample_eval(self, *, step: int, weight_version: int) -> dict[str, Any]:
        """Sample the held-out prompts. Returns nothing if no server was left."""
        with self._engine.giving_up():
            done = super().sample_eval(step=step, weight_version=weight_version)
        return {} if objects.on_any(self._is_stuck()) else done

    def _collected(self, weight_version: int) -> Collected | None:
        collected = self._sampler.collect_unless(weight_version, self._is_stuck)
        if collected is None:
            return None
        self._wait.end()
        everywhere = objects.all_gather(self._engine.take_metrics())
        metrics = {name: sum(each[name] for each in everywhere) for name in everywhere[0]}
        # Each controller notes what happens to a server as a whole.
        for name, joined in (("admitted", min), ("excluded", max), ("returned", max)):
            metrics[f"servers/{name}"] = joined(each[f"servers/{name}"] for each in everywhere)
        return replace(collected, metrics=collected.metrics | metrics)

    def _is_stuck(self) -> bool:
        return not self._engine.admitted

    def abandon_step(self) -> None:
        """Count the step whose `collect` returned nothing as not begun."""
        self._sampler.abandon_step()


def _server_engine(job: Job) -> ServerEngine:
    spec, config = job.spec, job.config
    servers = ServersConfig(
        config.rollout.servers,
        seqs_per_server=math.ceil(config.engine.rollout_max_num_seqs / dist.get_world_size()),
        vocab_size=spec.shape.vocab_size,
        header_env=config.rollout.rollout_servers_header_env,
        routed_layers=spec.routed_layers if config.trainer.routing_replay == R3 else None,
        end_tokens=spec.end_tokens,
    )
    tokenizer = load_tokenizer(
        spec.checkpoint.folder, trust_remote_code=spec.trust_remote_code, needs_template=False
    )
    return ServerEngine(servers, tokenizer)


def serve_controllers(job: Job) -> None:
    """Run controllers until the actor ends the run. Collective over these."""
    serve_sampling(job, NAME, partial(ControllerRanks, job, None))
