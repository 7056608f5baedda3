"""What two ranks do for the tests of the engine: put engines through it, and tell what happened.

All engines live one after the other in the same two processes: importing vLLM costs more than any
of them, and closing one must leave everything as it was.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoTokenizer

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.hybrid_engine.vllm.reload import Reloader
from mcore_rl.hybrid_engine.vllm.sliced_tensor import SlicedTensor
from mcore_rl.model.boxes import Box, volume
from tests.cuda.reachable import reachable
from tests.dist.sleeping import digest, memory_gone_while_asleep
from tests.engine_place import EnginePlace
from tests.engine_samples import sample_responses, small_engine

Weights = Mapping[str, torch.Tensor]
SEQUENCES = [list(range(5, 37)), list(range(40, 50))]
_NOT_STORED = ("kv_cache", "handler_tensor", "cpu_linear.wide")


def metadata_of(weights: Weights) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}


def slices(weights: Weights, needs: Mapping[str, Iterable[Box]]) -> dict[str, SlicedTensor]:
    """Stand-ins that hold the needed boxes and nothing else."""
    return {
        name: SlicedTensor(
            name,
            whole.shape,
            whole.dtype,
            [(box, whole[tuple(slice(*r) for r in box)].clone()) for box in needs[name]],
        )
        for name, whole in weights.items()
    }


def halves(
    weights: Weights, needs: Mapping[str, Iterable[Box]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The needed boxes in two items per tensor, cut along the last dimension.

    The first halves of two tensors come before their second ones, and each is overwritten when the
    next item is asked for.
    """
    names = [name for name in weights if needs[name]]
    for pair in (names[at : at + 2] for at in range(0, len(names), 2)):
        for half, name in itertools.product((0, 1), pair):
            whole, pieces = weights[name], []
            for box in needs[name]:
                start, stop = box[-1]
                middle = (start + stop) // 2
                part = (*box[:-1], ((start, middle), (middle, stop))[half])
                pieces.append((part, whole[tuple(slice(*r) for r in part)].clone()))
            yield name, SlicedTensor(name, whole.shape, whole.dtype, pieces)
            for _, data in pieces:
                data.fill_(float("nan"))


class Witness:
    """`on_write` of a reload: counts what was written, and compares it with what it should be."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.elements = 0
        self.wrong: list[str] = []

    def __call__(self, name: str, box: Box, data: torch.Tensor) -> None:
        self.elements += volume(box)
        expected = self._weights[name][tuple(slice(*r) for r in box)]
        if data.dtype != expected.dtype or not torch.equal(data, expected):
            self.wrong.append(name)


def snapshot(engine: VLLMEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.stored_tensors()}


def differing(engine: VLLMEngine, before: Weights) -> list[str]:
    """Which stored tensors are not what they were, bit for bit."""
    now = dict(engine.stored_tensors())
    assert now.keys() == before.keys()
    return sorted(name for name, tensor in now.items() if not torch.equal(tensor, before[name]))


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:  # the tests look at what it is
        return f"{type(error).__name__}: {error}"
    return "no error"


def weights_of(checkpoint: Path) -> tuple[Weights, Weights]:
    """The checkpoint's tensors: those of the model, and those of its MTP layers."""
    weights = load_file(checkpoint / "model.safetensors")
    num_layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    mtp = {n: t for n, t in weights.items() if n.startswith(f"model.layers.{num_layers}.")}
    return {n: t for n, t in weights.items() if n not in mtp}, mtp


@memory_gone_while_asleep()
def hand_over(checkpoint: Path, **config: Any) -> dict[str, Any]:
    """Load from disk, learn, load zeros, load slices, sleep: what is stored after each."""
    weights, mtp = weights_of(checkpoint)
    engine = VLLMEngine(small_engine(checkpoint, **config))
    as_loaded, stored = reached(engine), snapshot(engine)
    scores, sampled = engine.prompt_log_probs(SEQUENCES), as_json(seeded(engine))

    def scores_differ() -> bool:
        return any(
            not np.array_equal(a, b)
            for a, b in zip(scores, engine.prompt_log_probs(SEQUENCES), strict=True)
        )

    needs = engine.learn_needs(metadata_of({**weights, **mtp}))
    result: dict[str, Any] = {
        "score_lengths": [len(s) for s in scores],
        "after_learning": [differing(engine, stored), scores_differ()],
        "needed_elements": sum(volume(b) for boxes in needs.values() for b in boxes),
        "mtp_needs": [needs[name] for name in mtp],
    }
    engine.reload((name, torch.zeros_like(t)) for name, t in weights.items())
    result["same_as_zeros"] = sorted(stored.keys() - set(differing(engine, stored)))
    for _ in range(2):  # the second time the loaders have been wrapped before
        engine.reload(slices(weights, needs).items())
    result["after_slices"] = [differing(engine, stored), scores_differ()]
    engine.reload((name, torch.zeros_like(t)) for name, t in weights.items())
    witness = Witness(weights)
    engine.reload(halves(weights, needs), witness)
    result["after_halves"] = [differing(engine, stored), scores_differ()]
    result["witnessed"] = [witness.elements, witness.wrong]
    result["learned_again_differs"] = differing_needs(engine, weights, needs)
    engine.sleep()
    asleep = reached(engine)
    engine.wake_weights()
    overwritten = [p for p, d in reached(engine).items() if not asleep.get(p) and d != as_loaded[p]]
    engine.reload(slices(weights, needs).items())
    engine.wake_kv_cache()
    now = reached(engine)
    result["overwritten"] = sorted({path.rpartition(".")[2] for path in overwritten})
    result["kept_asleep"] = sorted(path for path, digest in asleep.items() if digest)
    result["lost"] = sorted(path for path in as_loaded if now.get(path) != as_loaded[path])
    result["after_sleep"] = [differing(engine, stored), scores_differ()]
    result["sampled_after_sleep"] = as_json(seeded(engine)) == sampled
    result["num_stored"], result["num_reached"] = len(stored), len(as_loaded)
    result["close"] = close(engine)
    return result


def reached(engine: VLLMEngine) -> dict[str, str]:
    """Every tensor that the model can read, by its path, as a digest; "" without memory.

    But for keys and values, addresses of packed weights, and the float32 copies that a CPU without
    AVX-512 makes at the first product: weights are compared by what they compute
    (`stored_tensors`).
    """
    return {
        path: digest(tensor) if tensor.untyped_storage().nbytes() else ""
        for path, tensor in reachable(engine.model).items()
        if tensor.numel() and not path.endswith(_NOT_STORED)
    }


def seeded(engine: VLLMEngine) -> list[Rollout]:
    return sample_responses(engine, prompts(), **sampling(num_samples=2, seed=5))


def differing_needs(
    engine: VLLMEngine, weights: Weights, before: Mapping[str, tuple[Box, ...]]
) -> list[str]:
    """Learn once more, in the reverse order and after reloads."""
    reloader = Reloader(engine.model, engine._vllm_config)
    again = reloader.learn_needs(dict(reversed(metadata_of(weights).items())))
    return [name for name in weights if again[name] != before[name]]


def close(engine: VLLMEngine) -> dict[str, Any]:
    """Segments in /dev/shm that this process has mapped, and the world, before and after."""

    def mapped_segments() -> list[str]:
        maps = Path("/proc/self/maps").read_text()
        paths = set(re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE))
        return sorted(path for path in paths if os.path.exists(path))

    before = mapped_segments()
    named = [p.name for p in Path("/dev/shm").glob(f"mcore_rl-*-{os.getpid()}-*")]
    dist.barrier()
    engine.close()
    engine.close()
    dist.barrier()
    total = torch.ones(1)
    dist.all_reduce(total)
    left = [path for path in before if os.path.exists(path)]
    return {"before": before, "named": named, "left": left, "world_sum": total.item()}


def strictness(checkpoint: Path) -> dict[str, str]:
    """What faulty hand-overs raise; each but the last leaves an engine that refuses to generate."""
    weights, mtp = weights_of(checkpoint)
    engine = VLLMEngine(small_engine(checkpoint, "dummy"))
    norm, expert = "model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight"

    def without(name: str) -> Weights:
        return {n: t for n, t in weights.items() if n != name}

    def twice() -> Iterable[tuple[str, torch.Tensor]]:
        yield from weights.items()
        yield norm, weights[norm]

    def reload(changed: Weights) -> str:
        return error_of(lambda: engine.reload(changed.items()))

    def rows(start: int, stop: int) -> tuple[str, torch.Tensor]:
        whole = weights[norm]
        pieces = [(((start, stop),), whole[start:stop])]
        return norm, SlicedTensor(norm, whole.shape, whole.dtype, pieces)

    short = {**weights, expert: weights[expert][:-1]}
    errors = {
        "generate on dummy weights": error_of(lambda: engine.prompt_log_probs(SEQUENCES)),
        "missing, nothing learned": reload(without(expert)),
        "generate after a failure": error_of(lambda: engine.prompt_log_probs(SEQUENCES)),
        "unknown": reload({**weights, "model.layers.0.mlp.gate.weight": weights[norm]}),
        "unknown expert": reload({**weights, expert.replace(".3.", ".99."): weights[expert]}),
        "too small": reload(short),
        "twice": error_of(lambda: engine.reload(twice())),
    }
    needs = engine.learn_needs(metadata_of(weights))
    errors["missing, learned"] = reload(without(norm))
    held = {**needs, expert: [((0, 8), needs[expert][0][1])]}
    errors["outside the slices"] = reload(slices(weights, held))
    rest = list(without(norm).items())
    errors["a part twice"] = error_of(lambda: engine.reload([*rest, rows(0, 40), rows(32, 64)]))
    errors["a part missing"] = error_of(lambda: engine.reload([*rest, rows(0, 40), rows(48, 64)]))
    errors["complete again"] = reload(weights)
    scores = engine.prompt_log_probs(SEQUENCES)
    errors["without a place"] = reload({**weights, **mtp})
    errors["sleep"] = error_of(engine.sleep)
    errors["generate asleep"] = error_of(lambda: engine.prompt_log_probs(SEQUENCES))
    errors["reload asleep"] = reload(weights)
    engine.wake_weights()
    engine.wake_kv_cache()
    errors["wake twice"] = error_of(engine.wake_kv_cache)
    errors["generate before reload"] = error_of(lambda: engine.prompt_log_probs(SEQUENCES))
    errors["reload after sleep"] = reload(weights)
    again = engine.prompt_log_probs(SEQUENCES)
    same = all(np.array_equal(a, b) for a, b in zip(scores, again, strict=True))
    errors["scores after all that"] = "the same" if same else "others"
    engine.sleep(keep_weights=True)
    engine.wake_weights()
    engine.wake_kv_cache()
    errors["kept weights"] = error_of(lambda: engine.prompt_log_probs(SEQUENCES))
    engine.close()
    return errors


def disagreement(checkpoint: Path) -> dict[str, str]:
    """Rank 1 lacks a slice, while the weights come by collectives: both must hear of it."""
    weights, _ = weights_of(checkpoint)
    engine = VLLMEngine(small_engine(checkpoint, "dummy", tp_size=2))
    needs = engine.learn_needs(metadata_of(weights))
    lacking = {**needs, "model.layers.1.self_attn.o_proj.weight": ()}

    def arriving(held: Mapping[str, Iterable[Box]]) -> Iterable[tuple[str, torch.Tensor]]:
        for item in slices(weights, held).items():
            dist.all_reduce(torch.ones(1))
            yield item

    errors = {
        "faulty": error_of(
            lambda: engine.reload(arriving(lacking if dist.get_rank() == 1 else needs))
        ),
        "generate after": error_of(lambda: engine.prompt_log_probs(SEQUENCES)),
        "right": error_of(lambda: engine.reload(arriving(needs))),
    }
    engine.close()
    return errors


def prompts() -> list[Prompt]:
    tokens = np.random.default_rng(0).integers(4, 60, size=(3, 12)).astype(np.int32)
    return [Prompt(10 * i, "", "", row[: 10 + i]) for i, row in enumerate(tokens)]


def sampling(**changes: Any) -> dict[str, Any]:
    options = dict(num_samples=8, temperature=1.0, max_tokens=16, weight_version=3)
    return options | changes


def as_json(rollouts: list[Rollout]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": r.prompt.index,
            "sample": r.sample_index,
            "tokens": r.response_token_ids.tolist(),
            "dtypes": [str(r.response_token_ids.dtype), str(r.rollout_log_probs.dtype)],
            "log_probs": r.rollout_log_probs.tolist(),
            "text": r.text,
            "finish_reason": r.finish_reason,
            "weight_version": r.weight_version,
        }
        for r in rollouts
    ]


def rollouts(checkpoint: Path, **config: Any) -> dict[str, Any]:
    """Sample under equal and under different seeds, and score what was sampled."""
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    engine = VLLMEngine(small_engine(checkpoint, **config))
    kept = torch.equal(states[0], torch.get_rng_state())
    kept &= states[1] == np.random.get_state()[1].tolist()

    def sample(seed: int, **changes: Any) -> list[Rollout]:
        engine.seed_sampling(seed)
        return sample_responses(engine, prompts(), **sampling(**changes))

    first = sample(1)
    tokens = [np.concatenate([r.prompt.token_ids, r.response_token_ids]).tolist() for r in first]
    scores = engine.prompt_log_probs(tokens)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    result = {
        "random_state_kept": kept,
        "first": as_json(first),
        "again": as_json(sample(1)),
        "own_seed": as_json(sample(100 + EnginePlace.of(engine).engine_index)),
        "greedy": as_json(sample(2, temperature=0.0, num_samples=1)),
        "narrow": as_json(sample(3, temperature=0.5, top_k=2)),
        "ignore_eos": as_json(sample(1, ignore_eos=True)),
        "scores": [
            score[len(r.prompt.token_ids) - 1 :].tolist()
            for score, r in zip(scores, first, strict=True)
        ],
        "texts": [
            tokenizer.decode(r.response_token_ids.tolist(), skip_special_tokens=True) for r in first
        ],
    }
    engine.close()
    return result


@contextmanager
def scheduling_ahead() -> Iterator[None]:
    """In which engines start that schedule a step before the last one's tokens are known, as on
    CUDA; vLLM switches that off on CPU."""
    from vllm.platforms.cpu import CpuPlatform

    configure = CpuPlatform.check_and_update_config

    def and_ahead(cls: Any, config: Any) -> None:
        configure(config)
        config.scheduler_config.async_scheduling = True

    with patch.object(CpuPlatform, "check_and_update_config", classmethod(and_ahead)):
        yield


def rollouts_scheduled_ahead(checkpoint: Path, **config: Any) -> dict[str, Any]:
    """`rollouts` in short, with a hand-over while a step is still to be taken."""
    with scheduling_ahead():
        engine = VLLMEngine(small_engine(checkpoint, **config))

    def sample(seed: int, **changes: Any) -> list[dict[str, Any]]:
        engine.seed_sampling(seed)
        return as_json(sample_responses(engine, prompts(), **sampling(**changes)))

    first = sample(1)
    result = {
        "first": first,
        "steps_left": len(engine._llm.llm_engine.engine_core.engine_core.batch_queue),
    }
    engine.sleep()
    engine.wake_weights()
    engine.reload(weights_of(checkpoint)[0].items())
    engine.wake_kv_cache()
    result["again"] = sample(1)
    result["greedy"] = sample(2, temperature=0.0, num_samples=1)
    result["narrow"] = sample(3, temperature=0.5, top_k=2)
    tokens = {prompt.index: prompt.token_ids.tolist() for prompt in prompts()}
    texts = [tokens[r["prompt"]] + r["tokens"] for r in first]
    scores = engine.prompt_log_probs(texts)
    result["scores"] = [
        score[len(tokens[r["prompt"]]) - 1 :].tolist()
        for score, r in zip(scores, first, strict=True)
    ]
    engine.close()
    return result


def run(checkpoints: dict[str, str]) -> dict[str, Any]:
    """Everything, on this rank. `checkpoints` maps architectures to directories."""
    paths = {name: Path(path) for name, path in checkpoints.items()}
    dist.init_process_group("gloo")
    parallel = dict(tp_size=2, enable_expert_parallel=True)
    v3 = paths["deepseek_v3"]
    return {
        "hand_over": {
            "deepseek_v3, TP2 with EP": hand_over(v3, **parallel),
            "deepseek_v3, TP2": hand_over(v3, tp_size=2),
            "deepseek_v2, TP2 with EP": hand_over(paths["deepseek_v2"], **parallel),
            "qwen3_moe, TP2 with EP": hand_over(paths["qwen3_moe"], **parallel),
            "qwen3_moe, TP1": hand_over(paths["qwen3_moe"]),
            "qwen3, tied, TP2": hand_over(paths["qwen3"], tp_size=2),
        },
        "strictness": strictness(v3),
        "disagreement": disagreement(v3),
        "one engine of two": rollouts(v3, **parallel),
        "two engines of one": rollouts(v3),
        "one engine, scheduled ahead": rollouts_scheduled_ahead(v3, **parallel),
    }
