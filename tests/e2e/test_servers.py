"""Whole runs that sample from `vllm serve` processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mcore_rl.observe.run_directory import read_metrics
from tests.dist.test_value_model import reward_model
from tests.e2e import kill_runs
from tests.e2e.kill_runs import Setting
from tests.e2e.recipe import HOOKS, SMALL, metrics_of, run_job, task_flags
from tests.rank_pool import RankPool
from tests.vllm_servers import RECEIVES, VLLMServer, running, two_engines, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ONE = ("--expert-model-parallel-size", "1")
NO_REPLAY = ("--rl-routing-replay", "off")  # on CPUs servers do not return experts


@pytest.fixture(scope="module")
def checkpoint(checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory()


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint by another path."""
    link = tmp_path_factory.mktemp("served") / "checkpoint"
    link.symlink_to(checkpoint)
    return link


@pytest.fixture(scope="module")
def servers(served: Path, warm_python: Path) -> Iterator[list[VLLMServer]]:
    """The second has two engines, which vLLM pauses together before their weights change."""
    options = {"of_last": two_engines(), "python": warm_python}
    with running(served, 2, *RECEIVES, **options) as servers:
        yield servers


def flags_of(servers: list[VLLMServer], staleness: int) -> tuple[str, ...]:
    urls = ",".join(each.url for each in servers)
    return ("--rl-rollout-servers", urls, "--rl-max-staleness", str(staleness))


def test_a_synchronous_run_trains_on_what_the_current_weights_sampled(
    checkpoint: Path, servers: list[VLLMServer], ranks: RankPool, tmp_path: Path
) -> None:
    model = reward_model(checkpoint, tmp_path / "reward", with_lm_head=False)
    tokens = task_flags(
        checkpoint,
        tmp_path / "run",
        *(*SMALL, *flags_of(servers, 0), "--rl-rollout-controllers", "2", "--rl-num-steps", "3"),
        *("--expert-model-parallel-size", "2", "--rl-eval-interval", "2", *NO_REPLAY),
        *("--rl-num-eval-prompts", "8", "--rl-attest", "full", "--rl-canary-interval", "2"),
        "--rl-reshard-delta",
        *("--rl-reward", "arithmetic,model", "--rl-reward-weights", "1,0.01"),
        *("--rl-reward-model", str(model), "--rl-reward-ranks", "2", "--rl-reward-ep-size", "1"),
        # With the sampled token as many log-probs as these servers return: vLLM's default of 20.
        *("--rl-policy-loss", "policy_gradient", "--rl-score-centering", "19"),
    )
    run_job(ranks, tokens, world_size=3).require(0)
    steps = metrics_of(tmp_path / "run")
    for metrics in steps[:3]:
        assert metrics["rollout/staleness_max"] == 0 and metrics["servers/admitted"] == 2
        assert metrics["mismatch/mean_abs_difference"] < 0.02  # of weights of another step: 0.2
        assert metrics["reshard/attested"] == 1 and metrics["reward/model/mean"] != 0
        assert 0 < metrics["centering/engine_mass"] < 1
    received, whole = (
        [metrics[f"reshard/{name}_bytes_max"] for metrics in steps[:3]]
        for name in ("received", "lower_bound")
    )
    assert received[0] == whole[0] > max(received[1:])  # later ones bring the changes
    assert "eval/accuracy" in steps[0] and "eval/accuracy" in steps[2]
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").open()]
    assert {row["weight_version"] for row in rows} == {1, 2, 3}
    log = (tmp_path / "run" / "run.log").read_text().splitlines()
    capacities = [line.partition(" gets at most ")[2][:2] for line in log if "gets at most" in line]
    assert capacities == ["32", "64"]  # --max-num-seqs is of each engine
    for server in servers:  # the first update and every second one after it
        compared = [line for line in log if f"[Canary] {server.url}: " in line]
        assert len(compared) == 2 and "(version 1," in compared[0] and "(version 3," in compared[1]


def test_servers_that_score_canaries_otherwise_get_no_requests(
    checkpoint: Path, servers: list[VLLMServer], ranks: RankPool, tmp_path: Path
) -> None:
    more = (*SMALL, *ONE, *NO_REPLAY, *flags_of(servers, 1), "--rl-canary-tolerance", "1e-9")
    more += ("--rl-rollout-server-wait-minutes", "0")
    ended = run_job(ranks, task_flags(checkpoint, tmp_path / "run", *more), world_size=1)
    ended.require(75)
    for server in servers:
        assert f"{server.url}: canary prompt" in ended.said
    assert "none was left" in ended.said


REASONS = ("odd", "third")  # of picky_filter.py


def test_controllers_ask_the_group_filter(
    checkpoint: Path, servers: list[VLLMServer], ranks: RankPool, tmp_path: Path
) -> None:
    more = [*SMALL, *ONE, *NO_REPLAY, *flags_of(servers, 1), "--rl-num-steps", "3"]
    more += ["--rl-import", str(HOOKS / "picky_filter.py"), "--rl-group-filter", "picky"]
    more += ["--rl-num-logged-rollouts", "1000"]
    run_job(ranks, task_flags(checkpoint, tmp_path / "run", *more), world_size=1).require(0)
    steps = [step for step in metrics_of(tmp_path / "run") if "reward/mean" in step]
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").open()]
    counts = {why: sum(step[f"rollout/filtered/{why}"] for step in steps) for why in REASONS}
    assert sum(counts.values()) > 0
    for why, count in counts.items():
        assert count >= sum(row["filtered"] == why for row in rows) / 4


@pytest.mark.parametrize(
    ("flags", "found", "remedy"),
    [
        ("--rl-max-response-tokens 500", "takes 128 tokens", "--max-model-len"),
        (
            "--rl-policy-loss policy_gradient --rl-score-centering 20",
            "returns at most 20 log-probs of each token",
            "--max-logprobs 21",
        ),
    ],
)
def test_a_server_that_does_not_fit_ends_the_start(
    checkpoint: Path,
    servers: list[VLLMServer],
    ranks: RankPool,
    tmp_path: Path,
    flags: str,
    found: str,
    remedy: str,
) -> None:
    more = (*SMALL, *ONE, *NO_REPLAY, *flags_of(servers, 1), *flags.split())
    ended = run_job(ranks, task_flags(checkpoint, tmp_path / "run", *more), world_size=1)
    ended.require(2)
    assert f"--rl-rollout-servers: {servers[0].url} {found}" in ended.said
    assert f"start its vllm serve with {remedy}" in ended.said


def test_a_server_with_another_model_in_a_folder_elsewhere_ends_the_first_update(
    checkpoint_factory: Callable[..., Path],
    checkpoint: Path,
    served: Path,
    servers: list[VLLMServer],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    other = checkpoint_factory(overrides={"intermediate_size": 96})
    served.unlink()  # its config.json cannot be read at the start
    more = (*SMALL, *ONE, *NO_REPLAY, *flags_of(servers[:1], 1))
    ended = run_job(ranks, task_flags(other, tmp_path / "run", *more), world_size=1)
    served.symlink_to(checkpoint)
    ended.require(2)
    assert f"--rl-rollout-servers {servers[0].url} serves another model" in ended.said
    assert "intermediate" in ended.said or ".mlp." in ended.said  # the tensor


def test_servers_may_die_and_return_and_a_run_without_any_stops_and_resumes(
    checkpoint: Path, servers: list[VLLMServer], tmp_path: Path
) -> None:
    setting = Setting(checkpoint, tmp_path, 1, 1, 1000, servers=tuple(servers))
    run_dir = tmp_path / "run"

    def admitted() -> list[float]:
        metrics = kill_runs.metrics_so_far(run_dir)
        return [metrics[step]["servers/admitted"] for step in sorted(metrics)]

    def disturb() -> None:
        until(lambda: len(admitted()) >= 2)
        servers[1].kill()
        until(lambda: admitted()[-1] == 1)
        servers[1].start()
        until(lambda: admitted()[-1] == 2)
        for each in servers:
            each.kill()

    with ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(disturb)
        more = ("--rl-rollout-server-wait-minutes", "0.05")
        ending = kill_runs.start(setting, run_dir, 1, more=more, exit_code=75)
        disturbed.result()
    assert ending.faults == []
    assert "[Servers] stopped after step" in ending.output
    servers[0].start()
    servers[0].wait()
    num_steps = len(admitted()) + 2
    again = Setting(checkpoint, tmp_path, 1, 1, num_steps, servers=(servers[0],))
    assert kill_runs.start(again, run_dir, 1).faults == []
    assert kill_runs.faults_of_history(run_dir, num_steps, 1) == []
    metrics = read_metrics(run_dir / "metrics.jsonl")
    counts = {
        name: sum(metrics[step][f"servers/{name}"] for step in range(num_steps))
        for name in ("excluded", "returned", "failed")
    }
    assert counts["excluded"] >= 1 and counts["returned"] >= 2 and counts["failed"] == 0
