"""What a rank does in `test_lora_rollout.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.peft_export import export_adapter
from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
from mcore_rl.hybrid_engine.switch_report import TO_ROLLOUT, ReshardReport
from mcore_rl.hybrid_engine.vllm.adapters import AdapterSlot
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.trainer.hand_overs import build_manager, engine_config
from mcore_rl.trainer.job import Job
from tests.dist.jobs import random_tokens, started
from tests.dist.sleeping import memory_gone_while_asleep
from tests.engine_samples import sample_responses

ADAPTER_REQUEST = "mcore_rl.hybrid_engine.vllm.in_process_engine.adapter_request"
FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"  # travels to rank 1


class Bench:
    """An engine in float32, its manager, and what was seen of each hand-over."""

    def __init__(self, job: Job, shards: Any, **changes: Any) -> None:
        config = dataclasses.replace(engine_config(job), dtype="float32", **changes)
        self.job, self.engine = job, VLLMEngine(config)
        self.manager = build_manager(job, shards, self.engine)
        self.reports: list[ReshardReport] = []
        self.manager.on_reshard_end.append(self.reports.append)

    def switch(self, target: Path | None = None, adapter: Path | None = None) -> dict[str, Any]:
        """One hand-over: what moved, and what the engine computes then. Its LoRA layers' memory
        goes to `target`. With `adapter`, vLLM reads that folder in place of what was handed over.
        """
        tokens = random_tokens(self.job.spec.shape.vocab_size)[:2]
        prompts = [
            Prompt(index=i, text="", answer="", token_ids=row[:16].numpy().astype(np.int32))
            for i, row in enumerate(tokens)
        ]
        with self.manager, contextlib.ExitStack() as stack:
            if adapter is not None:
                request = LoRARequest("exported", 2, str(adapter))
                stack.enter_context(mock.patch(ADAPTER_REQUEST, lambda: request))
            if target is not None:
                assert self.engine.adapters is not None
                stored = self.engine.adapters.stored_tensors()
                save_file({name: tensor.clone() for name, tensor in stored}, target)
            log_probs = self.engine.prompt_log_probs(tokens.tolist())
            rollouts = sample_responses(
                self.engine,
                prompts,
                num_samples=1,
                temperature=0.0,
                max_tokens=16,
                weight_version=1,
            )
        report = [each for each in self.reports if each.direction == TO_ROLLOUT][-1]
        return {
            "log_probs": [values.tolist() for values in log_probs],
            "sampled": [rollout.response_token_ids.tolist() for rollout in rollouts],
            "received_bytes": report.received_bytes,
            "attested": report.attested,
            "repeated": report.repeated,
            "num_tensors": report.num_tensors,
        }


@contextlib.contextmanager
def _flipped_bit(manager: MegatronVLLMShardingManager) -> Iterator[None]:
    """On rank 1 a bit of an adapter changes on its way."""
    transfer = manager.stream.transfer
    stream = transfer.stream

    def flipping(read: Any) -> Iterator[Any]:
        for name, pieces in stream(read):
            if name == FACTOR and dist.get_rank() == 1:
                pieces[0][1].view(-1)[3:4].view(torch.uint8)[2] ^= 1 << 4
            yield name, pieces

    with mock.patch.object(transfer, "stream", flipping):
        yield


def _error_for_a_router(bench: Bench) -> str:
    """What a slot says of an adapter of a layer that vLLM's model does not have."""
    lora = bench.job.spec.lora
    assert lora is not None
    modules = {**lora.modules, "model.layers.0.mlp.gate": (4, 64)}
    try:
        AdapterSlot(bench.engine._worker.model_runner, dataclasses.replace(lora, modules=modules))
    except UsageError as error:
        return str(error)
    return ""


def adapters(flags: list[str], target: str, *, then_merged: bool) -> dict[str, Any]:
    """Hand-overs of adapters, with a fault and with other values; then perhaps of merged weights.

    What sleeps of an engine has no memory meanwhile, except for what it keeps.
    """
    job, actor, shards = started(flags, in_float32=True)
    assert job.spec.lora is not None
    folder, rank = Path(target), dist.get_rank()
    found: dict[str, Any] = {}
    with memory_gone_while_asleep():
        bench = Bench(job, shards)
        found["first"] = bench.switch(folder / f"first_{rank}")
        with _flipped_bit(bench.manager):
            found["flipped"] = bench.switch(folder / f"flipped_{rank}")
        for adapter in shards._adapters.values():
            adapter.b.data.neg_()
        found["negated"] = bench.switch(folder / f"negated_{rank}")
        found["unserved"] = _error_for_a_router(bench)
        exported = folder / "exported"
        export_adapter(actor.state.chunks, job.spec.lora, job.spec.checkpoint.folder, exported)
        found["exported"] = bench.switch(adapter=exported)
        bench.engine.close()
    if then_merged:
        bench = Bench(job, shards, lora=None)
        found["negated_merged"] = bench.switch()
        for adapter in shards._adapters.values():
            adapter.b.data.neg_()
        found["first_merged"] = bench.switch()
        bench.engine.close()
    dist.destroy_process_group()
    return found
