"""Responses in parts: the data of each token, and their checkpoints."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save, save_file

from mcore_rl.batching.table import SampleTokens
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout, TopTokens, TurnReward
from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling
from mcore_rl.moe.routing import RoutedLayers, Routes
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.bank import read_records, write_records
from mcore_rl.rollout.group_encoding import EngineLimits
from mcore_rl.rollout.sampling_state import (
    SamplingState,
    check_environments,
    read_groups,
    read_lengths,
    write_groups,
    write_lengths,
)
from mcore_rl.rollout.segments import (
    KeptConversation,
    OpenGroup,
    extend_rollout,
    is_finished,
    new_rollout,
    turn_start,
)

PROMPT = Prompt(8, "how many", "", np.array([5, 6, 7], np.int32))


def part(
    so_far: Rollout,
    tokens: list[int],
    version: int,
    *,
    observed: tuple[int, ...] = (),
    limit: int = 4,
) -> Rollout:
    """Return the response with its next part; its experts encode the version that computed them."""
    ids = [*so_far.prompt.token_ids, *so_far.response_token_ids, *observed]
    computed = len(ids) + len(tokens) - 1
    routes = Routes(np.full((computed, 2, 1), version, np.uint8), np.ones(computed, np.bool_))
    request = Request(0, np.array(ids, np.int32), limit, Sampling())
    sampled = np.array(tokens, np.int32)
    log_probs = -sampled.astype(np.float32)
    top = TopTokens(np.stack([sampled, sampled + 1], axis=1), np.stack([log_probs] * 2, axis=1) / 2)
    completion = Completion(request, sampled, log_probs, "length", routes, top_tokens=top)
    return extend_rollout(so_far, completion, version)


def in_three_parts() -> Rollout:
    """Return a response with two tokens of version 1, two observed and one token of 3, two of 4."""
    first = part(new_rollout(PROMPT, 0, 1), [11, 12], 1)
    second = part(first, [13], 3, observed=(90, 91))
    return part(second, [14, 15], 4, limit=2)


def test_tokens_keep_their_log_prob_and_version() -> None:
    found = in_three_parts()
    assert found.response_token_ids.tolist() == [11, 12, 90, 91, 13, 14, 15]
    assert found.rollout_log_probs.tolist() == [-11, -12, 0, 0, -13, -14, -15]
    assert found.is_generated is not None and found.weight_versions is not None
    assert found.is_generated.tolist() == [True, True, False, False, True, True, True]
    assert found.weight_versions.tolist() == [1, 1, 3, 3, 3, 4, 4]
    assert (found.weight_version, found.oldest_version) == (4, 1)
    tokens = SampleTokens.of(ScoredRollout(found, 0.0))
    assert tokens.is_generated.tolist() == [False] * 3 + found.is_generated.tolist()


def test_tokens_keep_their_candidates() -> None:
    found = in_three_parts().top_tokens
    assert found is not None and found.ids.dtype == np.int32
    assert found.ids[:, 0].tolist() == [11, 12, 0, 0, 13, 14, 15]
    assert found.ids[:, 1].tolist() == [12, 13, 0, 0, 14, 15, 16]
    assert found.log_probs[:, 1].tolist() == [-5.5, -6, 0, 0, -6.5, -7, -7.5]
    assert found.log_probs.dtype == np.float32


def test_groups_fit_a_run_that_asks_for_as_many_candidates() -> None:
    group = OpenGroup(1, [in_three_parts(), None, new_rollout(PROMPT, 2, 1)])
    assert group.has_top_tokens(2, num_samples=3) and group.has_top_tokens(0, num_samples=3)
    assert not group.has_top_tokens(3, num_samples=3)
    greedy = dataclasses.replace(in_three_parts(), top_tokens=None)
    group = OpenGroup(1, [in_three_parts(), greedy])
    assert group.has_top_tokens(2, num_samples=1) and not group.has_top_tokens(2, num_samples=2)
    assert group.has_top_tokens(0, num_samples=2)


def test_experts_come_from_the_pass_that_sampled_the_next_token() -> None:
    routes = in_three_parts().routes
    assert routes is not None and routes.known.all()
    # The last sampled token has not been an input yet.
    assert routes.ids[:, 0, 0].tolist() == [1, 1, 1, 1, 3, 3, 3, 4, 4]


def test_only_responses_that_were_stopped_are_unfinished() -> None:
    assert not is_finished(part(new_rollout(PROMPT, 0, 1), [11], 1))
    assert is_finished(part(new_rollout(PROMPT, 0, 1), [11], 1, limit=1))


def test_failure_of_one_part_fails_the_response() -> None:
    broken = dataclasses.replace(part(new_rollout(PROMPT, 0, 1), [11], 1), failure="no experts")
    assert part(broken, [12], 2).failure == "no experts"


def groups() -> list[OpenGroup]:
    turns = (TurnReward(2, 0.1), TurnReward(7, -1.0))
    finished = dataclasses.replace(in_three_parts(), text="1 and 2", turn_rewards=turns)
    return [
        OpenGroup(
            draw,
            [finished, None, part(new_rollout(PROMPT, 2, 1), [draw], 1)],
            {0: outcomes},
            {0: Outcome(0.2, "no answer", "in 2 s")},
            {2: KeptConversation('{"a": [1]}', np.array([90, 91], np.int32), "Guess", "stop")},
        )
        for draw, outcomes in (
            (7, {"length": Outcome(0.1)}),
            (4, {"length": Outcome(0.0, "raised KeyError", "'x'")}),
            (9, {}),
        )
    ]


def plain(group: OpenGroup) -> str:
    """Return the group as text, exact to the last bit."""
    rollouts = [each and dataclasses.asdict(each) for each in group.rollouts]
    return repr(
        [group.draw, group.outcomes, group.environment_outcomes, group.conversations, rollouts]
    )


@pytest.mark.parametrize("num_tp_groups", [1, 2, 3])
def test_checkpoint_restores_pending_groups(tmp_path: Path, num_tp_groups: int) -> None:
    first, second, third = groups()
    write_groups([first, second], tmp_path, 0)
    write_groups([third], tmp_path, 1)
    prompts = {group.draw: PROMPT for group in groups()}
    found = [
        read_groups(
            tmp_path,
            prompts.__getitem__,
            tp_group=part,
            num_tp_groups=num_tp_groups,
            has_environments=True,
        )
        for part in range(num_tp_groups)
    ]
    expected = {
        1: [[second, first, third]],
        2: [[first, second], [third]],
        3: [[second], [first], [third]],
    }[num_tp_groups]
    assert [[plain(each) for each in part] for part in found] == [
        [plain(each) for each in part] for part in expected
    ]


def test_conversations_with_another_environment_are_refused(tmp_path: Path) -> None:
    write_groups(groups(), tmp_path / "rollout", 0)
    check_environments(tmp_path / "rollout", lambda draw: "Guess")
    with pytest.raises(UsageError, match="with Guess to continue, .* now Other"):
        check_environments(tmp_path / "rollout", lambda draw: "Other" if draw == 9 else "Guess")
    (tmp_path / "rollout" / "group_00001_1.bank").write_text("other")
    with pytest.raises(UsageError, match="unfinished groups"):
        check_environments(tmp_path / "rollout", lambda draw: "Guess")


def written(folder: Path) -> tuple[Path, dict[str, np.ndarray], str]:
    write_groups(groups()[:1], folder, 0)
    file = folder / "group_00000_1.bank"
    ((_, data),) = read_records(file)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    arrays = {name: array.copy() for name, array in load(data).items()}
    return file, arrays, header["__metadata__"]["groups"]


def write(file: Path, arrays: dict[str, np.ndarray], facts: str) -> None:
    write_records(file, [(7, save(arrays, {"groups": facts}))])


def read_again(
    file: Path, *, has_environments: bool = True, limits: EngineLimits | None = None
) -> list[OpenGroup]:
    return read_groups(
        file.parent,
        {7: PROMPT}.__getitem__,
        tp_group=0,
        num_tp_groups=1,
        has_environments=has_environments,
        limits=limits or EngineLimits(),
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *[('"draw": 7', f'"draw": {value}') for value in ("-7", "true", '"7"', "9" * 30, "8")],
        *[('"draw"', '"drawn"'), ('"samples": [', '"samples": 5, "other": [')],
        *[('"text": "1 and 2"', f'"text": {value}') for value in ("null", "5", "[]")],
        *[('"weight_version": 4', f'"weight_version": {value}') for value in ("-1", "0.5", '"4"')],
        *[('"failure": null', f'"failure": {value}') for value in ("5", '"", "more": 1')],
        *[('"length"', f'"{reason}"') for reason in ("", "abort", "Stop")],
        *[('"weight_version": 4', f'"weight_version": {value}') for value in (3, 2**31)],
        *[("[0.1, null", f"[{v}, null") for v in ('"0.1"', "null", "true", "NaN", "-Infinity")],
        *[('"0": {', '"9": {'), ('"0": {', '"x": {'), ('"outcomes": {', '"outcomes": [], "x": {')],
        *[("[[2, 0.1]", f"[[{v}]") for v in ("2", "8, 0.1", "-1, 0.1", '2, "0.1"', "2, NaN")],
        *[("[0.2, ", f"[{value}, ") for value in ("null", '"0.2"', "Infinity")],
        *[("[{", "[" * 100 + "{"), ("[{", "{"), ("}]", "")],
        *[('{"2": "stop"}', f'{{"{n}": "stop"}}') for n in ("0", "1", "3", "x")],
        *[('{"2": "stop"}', v) for v in ('{"2": 5}', '["2"]', '{"-1": null}', '{"2": "abort"}')],
        *[('{"2": "Guess"}', value) for value in ('{"2": 5}', '["Guess"]')],
    ],
)
def test_groups_with_wrong_values_are_refused(tmp_path: Path, old: str, new: str) -> None:
    file, arrays, facts = written(tmp_path)
    assert old in facts
    write(file, arrays, facts.replace(old, new))
    with pytest.raises(UsageError, match=f"--load: {file} does not hold unfinished.*load another"):
        read_again(file)


def test_groups_in_the_format_of_earlier_versions_are_refused_until_they_are_deleted(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "iter_0000003" / "rollout"
    folder.mkdir(parents=True)
    save_file({"empty": np.empty(0, np.uint8)}, folder / "group_00000.safetensors", {"groups": ""})
    with pytest.raises(UsageError, match="--load .*iter_0000003 has .* earlier version") as refused:
        read_again(folder / "any")
    named = refused.value.remedy.split("delete ")[1].split(",")[0]
    assert Path(named).parent == folder
    for file in folder.glob(Path(named).name):
        file.unlink()
    assert read_groups(folder, lambda draw: PROMPT, tp_group=0, num_tp_groups=1) == []


def test_response_whose_conversation_cannot_continue_starts_again(tmp_path: Path) -> None:
    expected = groups()[0]
    expected.rollouts[2] = None
    expected.conversations = {}
    file, arrays, facts = written(tmp_path)
    assert [plain(each) for each in read_again(file, has_environments=False)] == [plain(expected)]
    write(file, arrays, facts.replace('{"2": "stop"}', "{}"))
    assert [plain(each) for each in read_again(file)] == [plain(expected)]


@pytest.mark.parametrize(
    ("name", "array"),
    [
        *[("state", np.frombuffer(text, np.uint8)) for text in (b"{", b"\xff", b"[" * 500, b"")],
        ("state", np.frombuffer(b'"%b"' % (b"x" * (1 << 18)), np.uint8)),
        *[
            ("state", np.zeros(2, np.int32)),
            ("observed", np.zeros(2, np.int64)),
            ("observed", None),
        ],
    ],
)
def test_conversations_with_wrong_arrays_are_refused(
    tmp_path: Path, name: str, array: np.ndarray | None
) -> None:
    file, arrays, facts = written(tmp_path)
    del arrays[f"7/2/{name}"]
    if array is not None:
        arrays[f"7/2/{name}"] = array
    write(file, arrays, facts)
    with pytest.raises(UsageError, match=f"{file} does not hold unfinished groups of samples"):
        read_again(file)


def test_turn_starts_after_the_last_answer_and_its_observation() -> None:
    first = part(new_rollout(PROMPT, 0, 1), [11, 12], 1)
    assert turn_start(first) == 0
    answered = dataclasses.replace(first, turn_rewards=(TurnReward(2, 0.0),))
    assert turn_start(answered) == 2  # of a turn without tokens
    for observed in ((), (90, 91)):
        within = part(answered, [13], 3, observed=observed)
        assert turn_start(within) == 2 + len(observed)
        assert turn_start(part(within, [14], 4)) == 2 + len(observed)
    again = dataclasses.replace(within, turn_rewards=(TurnReward(2, 0.0), TurnReward(5, 0.0)))
    assert turn_start(again) == 5


@pytest.mark.parametrize("change", ["missing", "longer", "wider", "other"])
@pytest.mark.parametrize(
    "name",
    [
        *("response_token_ids", "rollout_log_probs", "is_generated", "prompt_token_ids"),
        *("top_ids", "top_log_probs"),
    ],
)
def test_groups_with_wrong_arrays_are_refused(tmp_path: Path, name: str, change: str) -> None:
    file, arrays, facts = written(tmp_path)
    array = arrays.pop(f"7/0/{name}")
    if change == "missing" and name == "is_generated":
        return  # no byte is missing
    changed = {
        "longer": np.append(array, array[:1]).astype(array.dtype),
        "wider": array[None],
        "other": array.astype(np.float64),
    }
    if change == "longer" and name == "prompt_token_ids":
        return  # a prompt may have any number of tokens
    if change != "missing":
        arrays[f"7/0/{name}"] = changed[change]
    write(file, arrays, facts)
    with pytest.raises(UsageError, match=f"{file} does not hold unfinished groups of samples"):
        read_again(file)


TOKENS = ("response_token_ids", "prompt_token_ids", "top_ids")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in TOKENS for value in (-1, -(2**31), 100)],
        *[("rollout_log_probs", value) for value in (np.nan, np.inf, -np.inf, 0.1, 1000, -9999)],
        *[("top_log_probs", value) for value in (np.nan, np.inf, -np.inf, 0.1, -10_000)],
        *[("weight_versions", value) for value in (-1, -(2**31), 5, 2**31 - 1)],
        *[("routes", value) for value in (8, 255)],
        ("routes as floats", 0),
        *[("2/observed", value) for value in (-1, 100)],
    ],
)
def test_values_that_no_engine_gives_are_refused(tmp_path: Path, name: str, value: float) -> None:
    """In one place of the array; the model has 100 tokens and two layers of 8 experts."""
    file, arrays, facts = written(tmp_path)
    routed = RoutedLayers((1, 2), 1, 8)
    limits = EngineLimits(vocab_size=100, routed=routed)
    (found,) = read_again(file, limits=limits)
    assert plain(found) == plain(groups()[0])
    if name == "routes as floats":
        name, arrays["7/0/routes"] = "routes", arrays["7/0/routes"].astype(np.float32)
    array = arrays[f"7/{name}" if "/" in name else f"7/0/{name}"]
    array[tuple(length - 1 for length in array.shape)] = value
    write(file, arrays, facts)
    with pytest.raises(UsageError, match=f"{file} does not hold unfinished groups of samples"):
        read_again(file, limits=limits)


def test_groups_that_cannot_have_been_sampled_are_refused(tmp_path: Path) -> None:
    """No samples, an outcome of a sample that continues, a sample that ended with nothing."""
    file, arrays, facts = written(tmp_path)
    (group,) = json.loads(facts)
    none = {name: {} for name in ("outcomes", "environment_outcomes", "conversations")}
    of_third = {**group["outcomes"], "2": group["outcomes"]["0"]}
    for changed in (
        {**group, "samples": [], **none},
        {**group, "outcomes": of_third},
        {**group, "environment_outcomes": {**group["environment_outcomes"], "1": [0.0, None, ""]}},
    ):
        write(file, arrays, json.dumps([changed]))
        with pytest.raises(UsageError, match="no samples, or outcomes of samples that have not"):
            read_again(file)
    nothing = OpenGroup(7, [dataclasses.replace(new_rollout(PROMPT, 0, 1), finish_reason="stop")])
    write_groups([nothing], file.parent, 0)
    with pytest.raises(UsageError, match="sample 0 has ended without tokens"):
        read_again(file)
    failed = dataclasses.replace(nothing.rollouts[0], failure="no server is left")
    write_groups([OpenGroup(7, [failed])], file.parent, 0)
    assert len(read_again(file, has_environments=False)) == 1


@pytest.mark.parametrize("num_layers", [1, 3])
def test_experts_of_other_layers_are_refused(tmp_path: Path, num_layers: int) -> None:
    file, _, _ = written(tmp_path)
    routed = RoutedLayers(tuple(range(num_layers)), 1, 8)
    with pytest.raises(UsageError, match="does not hold unfinished groups of samples"):
        read_again(file, limits=EngineLimits(routed=routed))


@pytest.mark.parametrize("num_tp_groups", [1, 3])
def test_pipes_in_place_of_groups_are_refused(tmp_path: Path, num_tp_groups: int) -> None:
    os.mkfifo(tmp_path / "group_00000_1.bank")
    with pytest.raises(UsageError, match="does not hold unfinished .* is not a regular file"):
        read_groups(tmp_path, lambda draw: PROMPT, tp_group=0, num_tp_groups=num_tp_groups)
    os.mkfifo(tmp_path / "ahead.json")
    with pytest.raises(UsageError, match="does not hold draws .* is not a regular file"):
        SamplingState.read(tmp_path, 0)
    os.mkfifo(tmp_path / "lengths.safetensors")
    with pytest.raises(UsageError, match="does not hold lengths .* is not a regular file"):
        read_lengths(tmp_path, np.empty(3, np.int32))


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_truncated_groups_are_refused(tmp_path: Path, size: int) -> None:
    file, _, _ = written(tmp_path)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UsageError, match=f"{file} does not hold unfinished groups of samples"):
        read_again(file)


@pytest.mark.parametrize(
    "arrays",
    [
        {"other": np.zeros(3, np.int32)},
        {"lengths": np.zeros(4, np.int32)},
        {"lengths": np.zeros((3, 1), np.int32)},
        {"lengths": np.zeros(3, np.float32)},
        {"lengths": np.full(3, -2, np.int32)},
        b"",
        None,
    ],
)
def test_malformed_lengths_are_refused(tmp_path: Path, arrays: object) -> None:
    file, lengths = tmp_path / "lengths.safetensors", np.full(3, 7, np.int32)
    if isinstance(arrays, dict):
        save_file(arrays, file)
    elif isinstance(arrays, bytes):
        file.write_bytes(arrays)
    else:
        file.mkdir()
    with pytest.raises(UsageError, match=f"--load: {file} does not hold lengths .*load another"):
        read_lengths(tmp_path, lengths)
    assert lengths.tolist() == [7, 7, 7]


def test_lengths_are_those_that_were_written_if_there_are_any(tmp_path: Path) -> None:
    lengths = np.full(3, 7, np.int32)
    read_lengths(tmp_path, lengths)
    assert lengths.tolist() == [7, 7, 7]
    write_lengths(np.array([-1, 0, 5], np.int32), tmp_path)
    read_lengths(tmp_path, lengths)
    assert lengths.tolist() == [-1, 0, 5]


def test_finished_response_that_no_environment_has_judged_starts_again(tmp_path: Path) -> None:
    """The run before had no environment, whose reward no other part of the run can give."""
    file, arrays, facts = written(tmp_path)
    earlier = json.loads(facts)
    earlier[0]["environment_outcomes"] = {}
    write(file, arrays, json.dumps(earlier))
    (found,) = read_again(file)
    assert found.rollouts[:2] == [None, None] and found.rollouts[2] is not None
    assert found.outcomes == {} and 2 in found.conversations
    (found,) = read_again(file, has_environments=False)
    assert found.rollouts[0] is not None and found.outcomes.keys() == {0}
