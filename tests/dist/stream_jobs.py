"""What ranks do in `test_stream.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling, seed_of
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.rollout.segments import OpenGroup
from mcore_rl.rollout.stream import StreamActions
from tests.engine_samples import small_engine
from tests.streams import run_stream

NUM_REQUESTS, MAX_TOKENS = 24, 40
END, DROP = (3, 11, 20), (5, 17)  # numbers of requests that do not come to their own end


def requests(sampling: Sampling) -> list[Request]:
    """Requests of different lengths, some with a shared beginning."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(4, 60, size=(NUM_REQUESTS // 3, 30)).astype(np.int32)
    return [
        Request(
            number=number,
            token_ids=tokens[number // 3][: 10 + number % 3 * 7],
            max_tokens=8 + number * 5 % MAX_TOKENS,
            sampling=sampling,
            seed=seed_of(7, number),
        )
        for number in range(NUM_REQUESTS)
    ]


class Trickle:
    """Keeps `at_once` requests running; ends and drops the given ones in the middle."""

    def __init__(
        self,
        requests: Sequence[Request],
        at_once: int,
        *,
        end: tuple[int, ...] = (),
        drop: tuple[int, ...] = (),
    ) -> None:
        self._waiting = iter(requests)
        self._left, self._at_once = len(requests), at_once
        self._end, self._drop = end, drop
        self.completions: list[Completion] = []
        self.dropped_lengths: dict[int, int] = {}

    def schedule(self, num_running: int) -> StreamActions:
        submit = tuple(itertools.islice(self._waiting, max(self._at_once - num_running, 0)))
        self._left -= len(submit)
        end: tuple[int, ...] = ()
        drop: tuple[int, ...] = ()
        if len(self.completions) >= 4 and (self._end or self._drop):
            end, drop, self._end, self._drop = self._end, self._drop, (), ()
        return StreamActions(submit, end, drop, more=self._left > 0)

    def finished(self, completion: Completion) -> None:
        self.completions.append(completion)

    def dropped(self, request: Request, num_tokens: int) -> None:
        self.dropped_lengths[request.number] = num_tokens

    def restored(self, groups: Sequence[OpenGroup]) -> None:
        raise AssertionError("a stream does not have a bank")

    def between_steps(self, num_running: int, step_seconds: float) -> None:
        """Nothing."""


def as_json(completions: Sequence[Completion]) -> list[dict[str, Any]]:
    return [
        {
            "number": each.number,
            "tokens": each.token_ids.tolist(),
            "log_probs": each.log_probs.tolist(),
            "finish_reason": each.finish_reason,
        }
        for each in sorted(completions, key=lambda each: each.number)
    ]


def streamed(checkpoint: str, dtype: str, tp_size: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    # Of several prompts in one step, one is cut.
    config = small_engine(checkpoint, dtype=dtype, tp_size=tp_size, max_num_batched_tokens=64)
    engine = VLLMEngine(config)
    from vllm import logprobs  # not before the engine has said how

    logprobs.Logprob = None  # an object for every token would cost more than all else of a step
    found: dict[str, Any] = {}
    some = requests(Sampling())
    for name, order, at_once, more in (
        ("all", some, 100, {}),
        ("few", some, 5, {}),
        ("alone", some, 1, {}),
        ("backwards", some[::-1], 7, {}),
        ("cut short", some, 100, {"end": END, "drop": DROP}),
    ):
        trickle = Trickle(order, at_once, **more)
        engine.seed_sampling(len(found))  # of no effect: each request has a seed
        run_stream(engine, trickle)
        found[name] = as_json(trickle.completions)
    found["dropped"] = trickle.dropped_lengths
    found["stopped"] = stopped(engine, some)
    found["faulty"] = faulty(engine, some)
    trickle = Trickle(some, 100)
    run_stream(engine, trickle)
    found["after all"] = as_json(trickle.completions)
    engine.close()
    dist.destroy_process_group()
    return found


def stopped(engine: VLLMEngine, some: Sequence[Request]) -> dict[str, Any]:
    """Greedy responses as far as a text of their own: at once, and in two parts between which that
    text is cut; and the slow way to find where they should end."""

    def run(all_requests: Sequence[Request]) -> list[dict[str, Any]]:
        trickle = Trickle(all_requests, 100)
        run_stream(engine, trickle)
        return as_json(trickle.completions)

    def text(ids: Sequence[int]) -> str:
        return engine.tokenizer.decode(ids, skip_special_tokens=False)

    greedy = [replace(each, sampling=Sampling(temperature=0.0)) for each in some]
    whole = [each["tokens"] for each in run(greedy)]
    at_once, in_parts, expected, first_parts = [], [], [], []
    for request, ids in zip(greedy, whole, strict=True):
        if len(ids) < 7:
            continue
        middle = len(text(ids[:4]))
        stop = text(ids[:7])[middle - 2 : middle + 2]  # of two tokens or more
        ends = [n for n in range(1, len(ids) + 1) if stop in text(ids[:n])]
        had = ends[0] - 1
        if had < 2 or "\ufffd" in stop:
            continue
        sampling = Sampling(temperature=0.0, stop=("never seen", stop))
        at_once.append(replace(request, sampling=sampling))
        in_parts.append(
            replace(
                at_once[-1],
                token_ids=np.concatenate([request.token_ids, ids[:had]], dtype=np.int32),
                max_tokens=request.max_tokens - had,
                num_own=had,
            )
        )
        expected.append(ids[: ends[0]])
        first_parts.append(ids[:had])
    return {
        "expected": expected,
        "first parts": first_parts,
        "at once": run(at_once),
        "second parts": run(in_parts),
    }


class Faulty(Trickle):
    """Raises in the middle, on all ranks of an engine."""

    def finished(self, completion: Completion) -> None:
        raise KeyError("a sink that fails")


def faulty(engine: VLLMEngine, some: Sequence[Request]) -> list[str]:
    """Errors of a scheduler that fails, and of two requests with one number; the requests that
    run then are dropped."""
    errors = []
    for scheduler in (Faulty(some, 100), Trickle([some[0], some[0]], 100)):
        try:
            run_stream(engine, scheduler)
        except (KeyError, ValueError) as error:
            errors.append(str(error))
    return errors
