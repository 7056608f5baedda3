"""Check that a hand-over gives the engine the right weights; run it for every new checkpoint.

    python -m mcore_rl.launch ... -m mcore_rl.verify <--rl-hf-checkpoint, --rl-prompts, degrees>

It loads the checkpoint into Megatron, and into vLLM by vLLM's own loader (FP8 blocks are
dequantised). It hashes what vLLM stores and overwrites each value with another one; then the
sharding manager hands Megatron's weights over. What vLLM stores must be equal, bit for bit, and
both must give the same prompts similar log-probs. As in a run, actor and engine take turns on a
device, or have ranks of their own.

With `--rl-verify-megatron-only`, for models that no engine here can run, Megatron's weights are
exported to `--rl-export-hf` and compared with the checkpoint instead.

Exit code 0 if the weights are equal, 1 if not, 2 for bad input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mcore_rl.common import objects
from mcore_rl.common.errors import UsageError
from mcore_rl.common.run_output import log_file, patient_stdout, setup_logging
from mcore_rl.common.values import difference, other_values
from mcore_rl.config import RLConfig
from mcore_rl.data.prompts import PromptSources, load_prompt_files
from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.hybrid_engine.proof.canary import differences, megatron_log_probs
from mcore_rl.hybrid_engine.proof.proof import NotProved
from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
from mcore_rl.hybrid_engine.switch_report import TO_ROLLOUT, ReshardReport, log_reshard
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.job.start import start
from mcore_rl.megatron.adapter import TrainState
from mcore_rl.megatron.float8 import quantised_weights
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, open_checkpoint, read_tensor
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.roles import ACTOR, ROLLOUT
from mcore_rl.model.tensors import is_mtp_copy
from mcore_rl.spec import JobSpec
from mcore_rl.trainer.actor import Actor
from mcore_rl.trainer.hand_overs import build_manager, build_offloader, engine_config, hand_over
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.models import build_actor
from mcore_rl.trainer.roles.remote import RemoteRole, serve

logger = logging.getLogger(__name__)

MAX_PROMPTS = 8
_WRITTEN = ("weight", "cpu_linear(identity)")  # ends of names of what every load writes
_MOST_READ_AGAIN = 10  # differing tensors of a rank whose values are compared


@dataclass(frozen=True, slots=True)
class Verification:
    """The content of `--rl-verify-out`. Log-probs: entry i of a prompt scores its token i + 1."""

    token_ids: list[list[int]]
    megatron_log_probs: list[list[float]]
    vllm_log_probs: list[list[float]]
    max_abs_difference: float
    mean_abs_difference: float
    num_tensors: int  # of the checkpoint that were handed over
    received_bytes_max: int  # by the rank that received most
    stored_equal: bool  # on every rank
    differing: list[str]  # "rank R: name ..." of stored tensors that differ, with both values


def stored_digests(engine: VLLMEngine) -> dict[str, str]:
    """Return the SHA-256 of every tensor that vLLM stores on this rank, whose weights must be
    awake."""
    return {name: _digest(tensor) for name, tensor in engine.stored_tensors()}


def _digest(tensor: torch.Tensor) -> str:
    # Copy on CPU, too: torch does not free memory that numpy has seen.
    content = tensor.detach().to("cpu", copy=True).contiguous()
    head = f"{content.dtype} {tuple(content.shape)} ".encode()
    return hashlib.sha256(
        head + content.reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def verify(job: Job, *, log: Any = None) -> Verification:
    """Compare vLLM's own load with a hand-over from Megatron. Collective; same result on all ranks.

    Raises NotProved if the hand-over's own proof fails. A rank that raises another error logs it at
    once: the others may wait for it forever.
    """
    try:
        if job.spec.roles.is_separate(ROLLOUT):
            return _verify_apart(job, log)
        state, shards = build_actor(job, log=log)
        return compare_loads(job, state, shards)
    except NotProved:
        raise
    except BaseException:
        rank = os.environ.get("RANK", "0")
        logger.exception("rank %s: the verification ended early", rank)
        raise


@dataclass(frozen=True, slots=True)
class MegatronVerification:
    """The content of `--rl-verify-out` with `--rl-verify-megatron-only`; lists as in
    `Verification`."""

    token_ids: list[list[int]]
    megatron_log_probs: list[list[float]]
    num_tensors: int  # of the checkpoint
    differing: list[str]  # tensors that are not exported as they were read, with both values


def verify_megatron(job: Job, *, log: Any = None) -> MegatronVerification:
    """Export what Megatron has read, compare it with the checkpoint bit for bit, and score prompts.
    Collective; same result on all ranks."""
    state, shards = build_actor(job, log=log)
    checkpoint, target = job.spec.checkpoint, job.config.trainer.export_hf
    assert target is not None, "checked by the resolver"
    export(shards, checkpoint, Path(target))
    written = open_checkpoint(
        Path(target), dataclasses.replace(job.spec.shape, quantization=None), flag="--rl-export-hf"
    )
    names = sorted(checkpoint.everything.keys() | written.everything.keys())
    mine = names[dist.get_rank() :: dist.get_world_size()]
    differences = {name: _exported_otherwise(checkpoint, written, name) for name in mine}
    differing = [f"{name}{differences[name]}" for name in mine if differences[name]]
    token_ids = _token_ids(job)
    batching = job.micro_batching()
    log_probs = megatron_log_probs(
        Actor(job, state).log_probs, token_ids, count_multiple_of=batching.count_multiple_of
    )
    return MegatronVerification(
        token_ids=token_ids,
        megatron_log_probs=[values.tolist() for values in log_probs],
        num_tensors=len(names),
        differing=sorted(name for part in objects.all_gather(differing) for name in part),
    )


def _exported_otherwise(checkpoint: HFCheckpoint, written: HFCheckpoint, name: str) -> str:
    """Return what differs, to follow the tensor's name; "" if nothing does."""
    for place, folder in (("checkpoint", checkpoint), ("export", written)):
        if name not in folder.files:
            return f" is missing in the {place}"
    places = ("in the checkpoint", "in the export")
    return difference(read_tensor(checkpoint, name), read_tensor(written, name), places)


def compare_loads(job: Job, state: TrainState, shards: ModelShards) -> Verification:
    """Compare the loads, given the actor. Collective.

    The actor is offloaded while an engine starts and loads the checkpoint by vLLM's own loader, and
    the engine sleeps while the actor scores.
    """
    offloader = build_offloader(job, state)
    with contextlib.ExitStack() as at_the_end:
        with offloader.all_offloaded():
            engine = _engine_with_checkpoint(job)
            at_the_end.callback(engine.close)
            expected = stored_digests(engine)
            manager = build_manager(job, shards, engine, offloader=offloader)
            left = overwrite(engine, job, expected)
        return _hand_over_and_compare(job, state, engine, manager, expected, left)


def _hand_over_and_compare(
    job: Job,
    state: TrainState,
    engine: VLLMEngine,
    manager: MegatronVLLMShardingManager,
    expected: Mapping[str, str],
    left: list[str],
) -> Verification:
    batching = job.micro_batching()
    actor = Actor(job, state)
    reports: list[ReshardReport] = []
    manager.on_reshard_end.append(reports.append)
    token_ids = _token_ids(job)
    with manager:
        vllm = engine.prompt_log_probs(token_ids)
        differing = left + stored_otherwise(engine, job, expected)
    megatron = megatron_log_probs(
        actor.log_probs, token_ids, count_multiple_of=batching.count_multiple_of
    )
    report = next(r for r in reports if r.direction == TO_ROLLOUT)
    logger.info("%s", log_reshard(report))
    return _compare(token_ids, megatron, vllm, len(job.spec.checkpoint.tensors), report, differing)


def _engine_with_checkpoint(job: Job) -> VLLMEngine:
    """Start an engine that has loaded the checkpoint by vLLM's own loaders."""
    by_us = (
        job.spec.shape.quantization is not None
        or job.spec.float8 is not None
        or not job.spec.checkpoint.is_all_that_vllm_reads
    )
    engine = VLLMEngine(engine_config(job, load_format="dummy" if by_us else "auto"))
    if by_us:
        engine.reload(_whole_tensors(engine, job))
    return engine


class VerifiedEngines:
    """Engines on ranks of their own, as the actor's ranks verify them. Methods are collective over
    the engines' ranks."""

    def __init__(self, job: Job) -> None:
        """Load the checkpoint, note what vLLM stores, and overwrite it."""
        self._job, self._engine = job, _engine_with_checkpoint(job)
        self._expected = stored_digests(self._engine)
        self._engine.sleep()
        self._left = overwrite(self._engine, job, self._expected)
        self._engine.wake_weights()
        self._engine.wake_kv_cache()

    def receive(self) -> dict[str, Any]:
        """Receive the actor's weights, with the actor's ranks. Returns the bytes that the rank that
        received most did."""
        report = hand_over(self._job, engine=self._engine).run(1)
        return {"received_bytes": max(objects.all_gather(report.received_bytes))}

    def compare(self, *, token_ids: list[list[int]]) -> dict[str, Any]:
        """Return the log-probs of prompts, and what differs."""
        log_probs = [values.tolist() for values in self._engine.prompt_log_probs(token_ids)]
        differing = self._left + stored_otherwise(self._engine, self._job, self._expected)
        return {"log_probs": log_probs, "differing": differing}

    def close(self) -> None:
        """End the engine. Not called by the actor."""
        self._engine.close()


def _verify_apart(job: Job, log: Any) -> Verification:
    """Compare the loads of engines on ranks of their own. Collective over the actor's ranks."""
    bridge, group = job.world.bridges.get(ROLLOUT), job.world.joint_groups[ROLLOUT]
    engines = RemoteRole("engines", bridge, group)  # they load while the actor is built
    state, shards = build_actor(job, log=log)
    finish = engines.begin(VerifiedEngines.receive)
    report = hand_over(job, shards=shards).run(1)
    answer = finish()
    token_ids = _token_ids(job)
    compared = engines.call(VerifiedEngines.compare, token_ids=token_ids)
    engines.close()
    in_megatron = megatron_log_probs(
        Actor(job, state).log_probs,
        token_ids,
        count_multiple_of=job.micro_batching().count_multiple_of,
    )
    report = dataclasses.replace(report, received_bytes=answer["received_bytes"])
    num_tensors, differing = len(job.spec.checkpoint.tensors), compared["differing"]
    arrays = [np.array(values) for values in compared["log_probs"]]
    return _compare(token_ids, in_megatron, arrays, num_tensors, report, differing)


def overwrite(engine: VLLMEngine, job: Job, expected: Mapping[str, str]) -> list[str]:
    """Load other values into a sleeping engine; return what of the first load is left.

    `expected` holds the digests of that load; the engine sleeps again afterwards. Collective over
    the engine's ranks; the result is the same on all.
    """
    engine.wake_weights()
    engine.reload(_whole_tensors(engine, job, change=other_values))
    digests = stored_digests(engine)
    left = [
        f"{name} holds {values[0]:.9g} before and after 0 and 1 were loaded into it"
        for name, tensor in engine.stored_tensors()
        if name.endswith(_WRITTEN)
        and digests[name] == expected[name]
        # Padding, which no loader writes, is 0.
        and (values := tensor.double()[tensor.double() != 0].tolist())
    ]
    engine.wake_kv_cache()
    engine.sleep()
    return _of_all_ranks(left)


def _whole_tensors(
    engine: VLLMEngine,
    job: Job,
    *,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield complete tensors for vLLM's own loaders, including its drafter's. FP8 blocks of the
    checkpoint are dequantised; weights that the engine holds in FP8 blocks are quantised."""
    checkpoint = job.spec.checkpoint
    names = [*checkpoint.tensors]
    if engine.drafter is not None:
        names += [name for name in checkpoint.mtp if not is_mtp_copy(name)]
    served = ((name, change(read_tensor(checkpoint, name))) for name in names)
    return served if engine.float8 is None else quantised_weights(served, engine.float8)


def stored_otherwise(engine: VLLMEngine, job: Job, expected: Mapping[str, str]) -> list[str]:
    """Return "rank R: name ..." of each stored tensor that is not as `expected` on any rank.

    If there is one, vLLM's own loaders load the checkpoint again for both values. Collective.
    """
    digests = stored_digests(engine)
    mine = sorted(n for n in expected.keys() | digests if expected.get(n) != digests.get(n))
    if not any(objects.all_gather(bool(mine))):
        return []
    read_again = mine[:_MOST_READ_AGAIN]
    stored = {
        name: tensor.to("cpu", copy=True)
        for name, tensor in engine.stored_tensors()
        if name in read_again
    }
    engine.reload(_whole_tensors(engine, job))
    places = ("after the hand-over", "as vLLM's own loader stores it")
    differences = {
        name: difference(stored[name], tensor.cpu(), places)
        for name, tensor in engine.stored_tensors()
        if name in stored
    }
    return _of_all_ranks([name + (differences.get(name) or " differs") for name in mine])


def _of_all_ranks(mine: list[str]) -> list[str]:
    everywhere = objects.all_gather(mine)
    return [f"rank {rank}: {each}" for rank, theirs in enumerate(everywhere) for each in theirs]


def _compare(
    token_ids: list[list[int]],
    megatron: Sequence[np.ndarray],
    vllm: Sequence[np.ndarray],
    num_tensors: int,
    report: ReshardReport,
    differing: list[str],
) -> Verification:
    difference = np.abs(np.concatenate(megatron) - np.concatenate(vllm))
    received = objects.all_gather(report.received_bytes)
    return Verification(
        token_ids=token_ids,
        megatron_log_probs=[values.tolist() for values in megatron],
        vllm_log_probs=[values.tolist() for values in vllm],
        max_abs_difference=float(difference.max()),
        mean_abs_difference=float(difference.mean()),
        num_tensors=num_tensors,
        received_bytes_max=max(received),
        stored_equal=not differing,
        differing=differing,
    )


def show(result: Verification, job: Job) -> None:
    """Print the result as a table."""
    table = Table(title=f"Megatron and vLLM on {job.spec.checkpoint.folder}")
    for column in ("prompt", "tokens", "max |difference|", "mean |difference|"):
        table.add_column(column, justify="right")
    means, largest = differences(result.megatron_log_probs, result.vllm_log_probs)
    for row, token_ids in enumerate(result.token_ids):
        table.add_row(str(row), str(len(token_ids)), f"{largest[row]:.4f}", f"{means[row]:.4f}")
    console = Console(file=patient_stdout())
    console.print(table)
    lines = {
        "train layout": job.spec.train_layout.describe(),
        "rollout layout": job.spec.rollout_layout.describe(),
        "tensors handed over": str(result.num_tensors),
        "received by a rank (max)": f"{result.received_bytes_max:,} bytes",
        "stored by vLLM, hand-over against its own loader": (
            "equal, bit for bit" if result.stored_equal else "DIFFERENT"
        ),
    }
    for name, value in lines.items():
        console.print(f"{name}: {value}", soft_wrap=True, highlight=False)
    _show_differing(console, result.differing)


def show_megatron(result: MegatronVerification, job: Job) -> None:
    """Print the result of `verify_megatron`."""
    console = Console(file=patient_stdout())
    means = [np.mean(values) for values in result.megatron_log_probs if values]
    lines = {
        "train layout": job.spec.train_layout.describe(),
        "mean log-prob of prompts": f"{np.mean(means):.4f}",
        f"{result.num_tensors} tensors, export against checkpoint": (
            f"{len(result.differing)} DIFFERENT" if result.differing else "equal, bit for bit"
        ),
    }
    for name, value in lines.items():
        console.print(f"{name}: {value}", soft_wrap=True, highlight=False)
    _show_differing(console, result.differing)


def _show_differing(console: Console, differing: Sequence[str]) -> None:
    for each in differing[:10]:
        console.print(f"  {each}", soft_wrap=True, highlight=False, markup=False)
    if len(differing) > 10:
        console.print(f"  and {len(differing) - 10} more", highlight=False)


def check_prompts_given(checked: JobSpec) -> None:
    """Raise UsageError without readable prompts; neither rewards nor a run directory are needed."""
    _prompts(checked.config, checked.checkpoint.folder, trusts=checked.trust_remote_code)


def _prompts(config: RLConfig, folder: Path, *, trusts: bool) -> PromptSources:
    options = dataclasses.replace(config.data, eval_prompts=None)
    return load_prompt_files(options, folder, trust_remote_code=trusts)[0]


def _token_ids(job: Job) -> list[list[int]]:
    rows = _prompts(job.config, job.spec.checkpoint.folder, trusts=job.args.trust_remote_code)
    return [rows[i].token_ids.tolist() for i in range(min(MAX_PROMPTS, len(rows)))]


def _check_job(spec: JobSpec) -> None:
    check_prompts_given(spec)
    if spec.config.rollout.servers:
        raise UsageError(
            "names engines that do not return their weights for a comparison",
            flag=f"--rl-rollout-servers {spec.config.rollout.rollout_servers}",
            remedy="drop it",
        )


def start_verification(tokens: Sequence[str], *, log: Any = None) -> Job:
    """Call `mcore_rl.job.start.start` for scoring prompts."""
    return start(
        tokens,
        also_check=_check_job,
        log=log,
        program="mcore_rl.verify",
        scores_only=True,
    )


def main(tokens: list[str] | None = None) -> int:
    """Run `-m mcore_rl.verify` and return the exit code."""
    setup_logging()
    tokens = sys.argv[1:] if tokens is None else tokens
    with log_file() as log:
        job = start_verification(tokens, log=log)
        if job.world.role != ACTOR:
            if job.world.role == ROLLOUT and not job.config.trainer.verify_megatron_only:
                bridge, group = job.world.bridges[ROLLOUT], job.world.joint_groups[ROLLOUT]
                serve("engines", bridge, group, partial(VerifiedEngines, job)).close()
            return 0  # other roles are not verified
        result: Verification | MegatronVerification
        if job.config.trainer.verify_megatron_only:
            result = verify_megatron(job, log=log)
            is_equal = not result.differing
        else:
            try:
                result = verify(job, log=log)
            except NotProved as error:  # the same on all ranks
                if dist.get_rank() == 0:
                    print(f"mcore_rl.verify: {error}", file=sys.stderr)
                return 1
            is_equal = result.stored_equal
    if dist.get_rank() == 0:
        if isinstance(result, Verification):
            show(result, job)
        else:
            show_megatron(result, job)
        if job.config.trainer.verify_out:
            text = json.dumps(dataclasses.asdict(result)) + "\n"
            Path(job.config.trainer.verify_out).write_text(text, encoding="utf-8")
    dist.destroy_process_group()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
