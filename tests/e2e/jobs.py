"""Whole runs, as one rank sees them; called by `tests.rank_pool`."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from mcore_rl import cli
from mcore_rl import train as train_module
from mcore_rl import verify as verify_module
from tests.dist.sleeping import memory_gone_while_asleep, starts_watched


def train(tokens: list[str]) -> None:
    """`-m mcore_rl.train`."""
    train_module.main(tokens)


def watched_train(tokens: list[str]) -> list[dict[str, Any]]:
    """`-m mcore_rl.train`; what `starts_watched` has seen."""
    with starts_watched() as seen:
        train_module.main(tokens)
    return seen


def verify(tokens: list[str]) -> int:
    """`-m mcore_rl.verify`; returns its exit code."""
    return verify_module.main(tokens)


def greedy_texts(folder: str, prompts: list[list[int]]) -> list[str]:
    """What vLLM says to prompts of token ids, in float32."""
    from vllm import LLM, SamplingParams

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # The default share of the host's memory may not be free.
    share = {"gpu_memory_utilization": 0.1}
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=128, **share)
    sampling = SamplingParams(temperature=0, max_tokens=24)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    return [output.outputs[0].text for output in outputs]


def command(tokens: list[str]) -> None:
    """`mcore-rl`; ends with its exit code."""
    sys.exit(cli.main(tokens))


def watched_verify(tokens: list[str]) -> dict[str, Any]:
    """`-m mcore_rl.verify`, where what sleeps has no memory meanwhile."""
    with memory_gone_while_asleep() as log, starts_watched() as seen:
        code = verify_module.main(tokens)
    return {"code": code, "starts": seen, "events": log.events}


def train_in_a_fork(tokens: list[str], megatron_tokens: list[str]) -> list[str]:
    """What a Megatron fork does: its own parser, start and model provider, then `mcore_rl.run`."""
    import mcore_rl
    from mcore_rl.megatron import adapter as megatron_adapter

    megatron_adapter.prepare()
    from megatron.core.models.gpt import GPTModel
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.global_vars import get_args
    from megatron.training.initialize import initialize_megatron

    sys.argv = ["fork.py", *megatron_tokens, *tokens]
    parse_and_validate_args(extra_args_provider=mcore_rl.add_rl_args)
    initialize_megatron(allow_no_cuda=True)
    args = get_args()
    built: list[str] = []

    def model_provider(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: object = None,
        pg_collection: object = None,
    ) -> torch.nn.Module:
        config = config or megatron_adapter.transformer_config(args)
        model = GPTModel(
            config=config,
            transformer_layer_spec=megatron_adapter.block_spec(config, vp_stage),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type="rope",
            rotary_base=args.rotary_base,
            pg_collection=pg_collection,
        )
        built.append(type(model).__name__)
        return model

    mcore_rl.run(args, model_provider)
    return built
