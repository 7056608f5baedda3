"""What a rank does in test_families: one model, all the ways its weights go."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from vllm.model_executor.layers import rotary_embedding

from mcore_rl import verify
from mcore_rl.common.run_output import setup_logging
from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.trainer.actor import Actor
from mcore_rl.trainer.hand_overs import engine_config
from mcore_rl.trainer.models import build_actor
from mcore_rl.verify import start_verification, stored_digests
from tests.dist.jobs import log_probs_of_random_tokens


def check_projection_norms(actor: Actor) -> None:
    """Values and gradients of a norm over the heads of all TP ranks are those of one process."""
    attention = actor.state.chunks[0].decoder.layers[0].self_attention
    group = parallel_state.get_tensor_model_parallel_group()
    random = torch.Generator().manual_seed(3)
    for norm in (attention.q_layernorm, attention.k_layernorm):
        head = attention.hidden_size_per_attention_head
        whole = torch.randn(5, 2, norm.width // head, head, generator=random, requires_grad=True)
        probe = torch.randn(whole.shape, generator=random)
        weight = norm.weight.detach().clone().requires_grad_()
        expected = F.rms_norm(whole.flatten(2), (norm.width,), weight, norm.eps).view(whole.shape)
        (expected * probe).sum().backward()

        mine = torch.arange(whole.shape[2]).chunk(group.size())[group.rank()]
        share = whole.detach()[:, :, mine].requires_grad_()
        found = norm(share)
        (of_weight, of_share) = torch.autograd.grad(
            (found * probe[:, :, mine]).sum(), (norm.weight, share)
        )
        dist.all_reduce(of_weight, group=group)
        assert torch.allclose(found, expected[:, :, mine], atol=1e-5)
        assert torch.allclose(of_share, whole.grad[:, :, mine], atol=1e-5)
        assert torch.allclose(of_weight, weight.grad, atol=1e-5)


def all_ways(
    flags: list[str], target: str, published: str, float8_target: str | None = None
) -> dict[str, Any]:
    """`mcore_rl.verify` of a folder, the way back into a checkpoint (and into one of FP8 blocks),
    and the engine on another folder that holds the same model."""
    setup_logging()
    rotary_embedding._ROPE_DICT.clear()  # those of earlier engines have had a forward pass
    with open("/dev/null", "w") as log:
        job = start_verification(flags, log=log)
        state, shards = build_actor(job, log=log)
    digests: list[dict[str, str]] = []

    def noted(engine: VLLMEngine) -> dict[str, str]:
        digests.append(stored_digests(engine))
        return digests[-1]

    with mock.patch.object(verify, "stored_digests", noted):
        verification = verify.compare_loads(job, state, shards)
    from_disk = digests[0]
    actor = Actor(job, state)
    log_probs = log_probs_of_random_tokens(job, actor)
    # Several files and several writers, whatever the size of the model.
    small: dict[str, Any] = {"max_file_bytes": 1 << 17, "bucket_bytes": 1 << 14}
    export(shards, job.spec.checkpoint, Path(target), **small)
    if float8_target is not None:
        export(shards, job.spec.checkpoint, Path(float8_target), as_float8=True, **small)

    by_us = bool(job.spec.checkpoint.others)  # which the text model's class does not know
    config = engine_config(job, load_format="dummy" if by_us else "auto")
    engine = VLLMEngine(replace(config, model_dir=Path(published)))
    if by_us:
        engine.reload(verify._whole_tensors(engine, job))
    differing = [name for name, d in stored_digests(engine).items() if from_disk.get(name) != d]
    scores = [scored.tolist() for scored in engine.prompt_log_probs(verification.token_ids)]
    engine.close()
    if job.spec.shape.norms_whole_projection:
        check_projection_norms(actor)
    result = {
        "verification": asdict(verification),
        "log_probs": log_probs.tolist(),
        "parameters": {
            name: list(value.shape)
            for chunk in actor.state.chunks
            for name, value in chunk.named_parameters()
        },
        "num_stored": len(from_disk),
        "published_stored_otherwise": differing,
        "published_log_probs": scores,
    }
    dist.destroy_process_group()
    return result
