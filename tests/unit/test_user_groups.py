"""Groups that a user's function samples, on a scripted engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.algorithms.registry import find_sampler, sampler
from mcore_rl.algorithms.samplers import Generate, Generated, Sampled, SamplerInputs
from mcore_rl.batching.types import Rollout
from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameters
from mcore_rl.common.user_code import import_user_file
from mcore_rl.config import RLConfig
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout import scheduler as scheduler_module
from mcore_rl.rollout.group_sampler import Rules
from mcore_rl.rollout.user_groups import UserGroups
from tests.unit.continuous_run import LateWriter, Run
from tests.unit.scripted_sampling import (
    MAX_TOKENS,
    ROOM,
    SIZE,
    ScriptedEngine,
    ScriptedRewards,
    Steps,
    log_probs_of,
    prompt_of,
)

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 1 << 31
LENGTH = 7  # of a response


class Engine(ScriptedEngine):
    """Ends a response at `length`, or at the limit of its request. A token is the length before
    it, after that of the prompt."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(lambda number: -1)
        self._most = length

    def step(self) -> list[Any]:
        ended = []
        self.batches.append(tuple(self.running))
        for number, (request, tokens) in list(self.running.items()):
            tokens.append(int(request.token_ids[0]) * 100 + len(request.token_ids) + len(tokens))
            at_end = len(request.token_ids) + len(tokens) > self._most
            at_limit = len(tokens) == request.max_tokens
            if at_end or at_limit or number in self.ending:
                del self.running[number]
                self.ending.discard(number)
                ended.append(completion(request, tokens, "stop" if at_end else "length"))
        return ended


def completion(request: Request, tokens: list[int], reason: str) -> Completion:
    ids = np.array(tokens, np.int32)
    return Completion(request, ids, log_probs_of(ids), reason)


class Rewards(ScriptedRewards):
    """A reward of 1 for each response."""

    def begin(self, rollout: Rollout) -> int:
        self._open.append((len(self.begun), rollout))
        self.begun.append(rollout.prompt.index * SIZE + rollout.sample_index)
        return len(self.begun) - 1

    def finished(self) -> Any:
        ready, self._open = self._open, []
        return [(ticket, {"length": Outcome(1.0)}) for ticket, _ in ready]


pytestmark = pytest.mark.usefixtures("restored_tables")


def groups_of(function: Callable[..., Any], parameters: Parameters | None = None) -> UserGroups:
    sampler("mine")(function)
    return UserGroups(
        find_sampler("mine"),
        parameters or Parameters(),
        vocab_size=VOCABULARY,
        text_of=lambda tokens: str(tokens.tolist()),
    )


def steps_of(function: Callable[..., Any], rules: Rules | None = None, **options: Any) -> Steps:
    rules = rules or Rules(4)
    return Steps(rules, Rewards(float), engine=Engine(), user_groups=groups_of(function), **options)


def whole(prompt: int, length: int = LENGTH) -> list[int]:
    """Return the tokens of a response that is sampled at once, or in parts."""
    return [prompt * 100 + at for at in range(1, length + 1)]


def in_two_parts(inputs: SamplerInputs, config: Parameters) -> Any:
    """Every response in two parts, of which the first is that of the next response as well."""
    prompt = inputs.prompt.token_ids
    first = yield [Generate(prompt, 3)] * inputs.num_samples
    assert all(isinstance(each, Generated) and each.finish_reason == "length" for each in first)
    second = yield [Generate([*prompt, *each.token_ids]) for each in first]
    return [
        Sampled([*a.token_ids, *b.token_ids], [*a.log_probs, *b.log_probs])
        for a, b in zip(first, second, strict=True)
    ]


def test_a_function_asks_again_and_returns_the_responses_of_its_group() -> None:
    steps = steps_of(in_two_parts)
    step = steps.step()
    assert [group.draw for group in step.taken] == [40, 41, 42, 43]
    for group in step.taken:
        for index, rollout in enumerate(group.rollouts):
            assert rollout is not None and rollout.sample_index == index
            assert rollout.response_token_ids.tolist() == whole(group.draw)
            expected = log_probs_of(np.array(whole(group.draw)))
            assert np.array_equal(rollout.rollout_log_probs, expected)
            assert (rollout.weight_version, rollout.is_generated) == (1, None)
            assert rollout.text == str(whole(group.draw))
            assert group.outcomes[index]["length"].reward == 1.0
    asked = steps.engine.submitted
    assert len(asked) == 4 * 2 * SIZE and len({each.seed for each in asked}) == len(asked)
    assert [each.max_tokens for each in asked if len(each.token_ids) == 4] == [MAX_TOKENS - 3] * (
        4 * SIZE
    )
    # Groups share the engine's room, and it runs no more than a group beyond it.
    assert ROOM <= steps.engine.most_running < ROOM + SIZE
    assert step.num_tokens == (4 * SIZE * LENGTH, 0)


def test_a_function_may_return_tokens_of_its_own_or_ask_for_nothing() -> None:
    def mine(inputs: SamplerInputs, config: Parameters) -> Any:
        if inputs.prompt.index % 2:
            return [Sampled([5, 6], [-0.5, -0.25], finish_reason="length")] * inputs.num_samples
        (end,) = yield [Generate([*inputs.prompt.token_ids, 9, 8])]
        tokens, nothing = [9, 8, *end.token_ids], [float("nan")] * 2
        generated = [False, False, *[True] * len(end.token_ids)]
        return [
            Sampled(tokens, [*nothing, *end.log_probs], generated)
            for _ in range(inputs.num_samples)
        ]

    for group in steps_of(mine).step().taken:
        for rollout in group.rollouts:
            assert rollout is not None
            if group.draw % 2:
                assert rollout.response_token_ids.tolist() == [5, 6]
                assert rollout.finish_reason == "length" and rollout.is_generated is None
            else:
                assert rollout.response_token_ids.tolist()[:2] == [9, 8]
                assert rollout.rollout_log_probs[:2].tolist() == [0.0, 0.0]
                assert rollout.is_generated is not None
                assert rollout.is_generated.tolist() == [False, False, *[True] * 5]


def test_prompts_say_how_many_responses_and_tokens_there_are() -> None:
    seen: list[tuple[int, int, str]] = []

    def mine(inputs: SamplerInputs, config: Parameters) -> Any:
        seen.append((inputs.num_samples, inputs.max_tokens, inputs.decode([1, 2])))
        ends = yield [Generate(inputs.prompt.token_ids)] * inputs.num_samples
        return [Sampled(each.token_ids, each.log_probs) for each in ends]

    def of_draw(draw: int) -> Any:
        own = {"num_samples": 5, "max_response_tokens": 4} if draw % 2 else {}
        return replace(prompt_of(draw), **own)

    steps = steps_of(mine, prompt_of=of_draw, most_samples=5)
    sizes = [len(group.rollouts) for group in steps.step().taken]
    assert sizes == [SIZE, 5, SIZE, 5]
    assert Counter(seen) == {(SIZE, MAX_TOKENS, "[1, 2]"): 2, (5, 4, "[1, 2]"): 2}


def test_a_group_that_a_step_leaves_begins_again_in_the_next() -> None:
    begun = Counter[int]()

    def mine(inputs: SamplerInputs, config: Parameters) -> Any:
        begun[inputs.prompt.index - 100] += 1
        parts = [[] for _ in range(inputs.num_samples)]
        for _ in range(1 if inputs.prompt.index % 2 else 6):
            more = yield [Generate([*inputs.prompt.token_ids, 7], 1)] * inputs.num_samples
            parts = [[*part, each] for part, each in zip(parts, more, strict=True)]
        return [
            Sampled([int(n) for each in part for n in each.token_ids], [-0.5] * len(part))
            for part in parts
        ]

    steps = steps_of(mine, Rules(2, max_staleness=4, extra_groups=2))
    first, second = steps.step(), steps.step()
    taken = [group.draw for group in (*first.taken, *second.taken)]
    assert len({*taken}) == 4 and max(begun.values()) > 1
    for group in second.taken:
        for rollout in group.rollouts:
            assert rollout is not None
            assert rollout.oldest_version == begun[group.draw]
    assert not steps.engine.running


def test_what_an_update_cuts_continues_with_the_new_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_module, "ThreadPoolExecutor", LateWriter)
    run = Run(3, most=2)
    engine = run.engines[0] = Engine(length=17)  # type: ignore[assignment]
    scheduler = run.schedulers[0]
    scheduler._engine, scheduler._user_groups = engine, groups_of(in_two_parts)  # type: ignore[assignment]
    scheduler._rewards = Rewards(float)  # type: ignore[assignment]
    rng = random.Random(1)
    for version in range(1, 8):
        run.pause()
        run.begin_step(version)
        run.train()
        left = iter(range(rng.randint(1, 4)))
        run.sample(0, lambda left=left: next(left, None) is None)
    run.close()
    assert len(run.trained) == 14
    for step, group in run.trained.values():
        for rollout in group.rollouts:
            assert rollout is not None
            assert rollout.response_token_ids.tolist() == whole(group.draw, 17)
            assert step - rollout.oldest_version <= 2
    again = [each for each in engine.submitted if each.num_own]
    assert again and all(each.num_own < 17 for each in again)


def test_a_sequence_that_fails_fails_all_responses_of_its_group() -> None:
    steps = steps_of(in_two_parts)
    step = steps.engine.step

    def failing() -> list[Completion]:
        return [
            replace(each, failure="the server is gone") if each.request.token_ids[0] == 41 else each
            for each in step()
        ]

    steps.engine.step = failing
    for group in steps.step().taken:
        rollouts = [each for each in group.rollouts if each is not None]
        assert len(rollouts) == SIZE
        for rollout in rollouts:
            failed = group.draw == 41
            assert rollout.failure == ("the server is gone" if failed else None)
            assert rollout.response_token_ids.tolist() == ([] if failed else whole(group.draw))
    assert len(steps.engine.submitted) == 3 * 2 * SIZE + SIZE  # the function has not gone on


def raises(inputs: SamplerInputs, config: Parameters) -> Any:
    yield [Generate(inputs.prompt.token_ids)]
    raise KeyError("mine")


def asks(what: Any) -> Callable[..., Any]:
    def mine(inputs: SamplerInputs, config: Parameters) -> Any:
        yield what(inputs)
        raise AssertionError("it was refused")

    return mine


def answers(*returned: Any) -> Callable[..., Any]:
    def mine(inputs: SamplerInputs, config: Parameters) -> Any:
        yield [Generate(inputs.prompt.token_ids)]
        return list(returned) * inputs.num_samples

    return mine


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (raises, r"raised KeyError: 'mine', in line \d+ of .*test_user_groups.py, for row 14\d"),
        (lambda inputs, config: [], r"returned \[\] and is not a generator"),
        (asks(lambda inputs: []), r"yielded \[\] for row .*yield a list of 1 to 4096 Generate"),
        (asks(lambda inputs: [3]), "yielded 3 for row"),
        (asks(lambda inputs: [Generate([-1])]), "with token ids from 0 to 2147483647"),
        (asks(lambda inputs: [Generate([0.5])]), "yielded Generate"),
        (asks(lambda inputs: [Generate([1] * 42)]), "asked for -1 tokens after 42"),
        (asks(lambda inputs: [Generate([1], 41)]), "asked for 41 tokens after 1 .* at most 40"),
        (answers(), r"returned \[\] for row .*return a list of 3 Sampled"),
        (answers(5), "response 0 to row 14. is not a Sampled"),
        (answers(Sampled([], [])), "has other token ids than 1 to 40 from 0 to"),
        (answers(Sampled([1] * 41, [-1.0] * 41)), "has 41 of at most 40 tokens"),
        (answers(Sampled([1, 2], [-1.0])), "needs log_probs of 2 floats"),
        (answers(Sampled([1, 2], [-1.0, 0.5])), "log_probs that are not finite and at most 0"),
        (answers(Sampled([1], [-1.0], [False])), "needs is_generated of 1 bools"),
        (answers(Sampled([1], [-1.0], None, "end")), "finish_reason 'end', not stop or length"),
    ],
)
def test_mistakes_of_a_function_end_the_run_with_one_sentence(
    function: Callable[..., Any], why: str
) -> None:
    steps = steps_of(function)
    with pytest.raises(RuntimeError, match=f"--rl-sampler mine.*{why}"):
        steps.step()
    assert not steps.engine.running


def test_the_example_samples_pairs_with_a_common_beginning() -> None:
    import_user_file(str(ROOT / "examples" / "own_parts" / "sampler.py"), flag="--rl-import")
    config = RLConfig.of(sampler="forks", fork_at=3)
    groups = UserGroups(
        find_sampler("forks"),
        config.recipe.sampler_parameters,
        vocab_size=VOCABULARY,
        text_of=lambda tokens: "",
    )
    steps = Steps(Rules(4), Rewards(float), engine=Engine(), user_groups=groups)
    for group in steps.step().taken:
        for rollout in group.rollouts:
            assert rollout is not None and rollout.response_token_ids.tolist() == whole(group.draw)
    lengths = Counter(len(each.token_ids) for each in steps.engine.submitted)
    assert lengths == {1: 4 * 2, 4: 4 * 4}  # of three responses, two pairs are sampled


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"algorithm": "remax"}, "--rl-sampler mine samples no greedy response"),
        ({"score_centering": 4}, "returns no candidates of each token"),
    ],
)
def test_parts_that_need_more_than_a_function_returns_are_refused(
    flags: dict[str, Any], why: str
) -> None:
    sampler("mine")(in_two_parts)
    with pytest.raises(UsageError, match=why):
        RLConfig.of(sampler="mine", **flags).recipe  # noqa: B018
