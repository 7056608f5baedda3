"""The client of a teacher's server, the check of tokenizers, and several teachers in a step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from mcore_rl.batching.assignment import division_of
from mcore_rl.batching.rows import MicroBatching
from mcore_rl.batching.table import SampleTable, SampleTokens
from mcore_rl.batching.types import StepBatch
from mcore_rl.common.errors import UsageError
from mcore_rl.common.http import HTTPFailure
from mcore_rl.config import RLConfig
from mcore_rl.hybrid_engine.remote import prompt_scores
from mcore_rl.hybrid_engine.remote.prompt_scores import PromptScores, ScoringFailed
from mcore_rl.job.teachers import check_same_vocabulary, check_teacher_servers
from mcore_rl.model.layout import TrainLayout
from mcore_rl.planner.activations import log_prob_activation_bytes
from mcore_rl.planner.host import host_phases
from mcore_rl.planner.layouts import with_train_layout
from mcore_rl.planner.memory import memory_of, resident_of, score_bytes
from mcore_rl.planner.models import stage_state, teacher_head_bytes
from mcore_rl.planner.phases import BUILD_TEACHER, LOG_PROBS, SCORES, START, TRAIN, Case
from mcore_rl.planner.plan import as_json, plan_case
from mcore_rl.planner.settings import GB
from mcore_rl.tools.plan.command_line import read_command_line
from mcore_rl.trainer.roles.samples import batch_by_plan, plan_epochs
from mcore_rl.trainer.roles.teacher import StepTeachers, Teacher, known_to
from tests import hostile
from tests.model_shapes import CONFIGS
from tests.scoring_server import ScoringServer, log_prob_of, scoring_server
from tests.unit.test_data import save_tokenizer

SAMPLES = [np.array(tokens, dtype=np.int32) for tokens in ([3, 1, 4, 1], [5], [9, 2])]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScoringServer]:
    monkeypatch.setattr(prompt_scores, "FIRST_PAUSE_SECONDS", 0.01)
    with scoring_server() as found:
        yield found


def scores(server: ScoringServer, wait_seconds: float = 60, **header: str) -> list[list[float]]:
    found = PromptScores(server.url + "/v1", header).log_probs(SAMPLES, wait_seconds)
    assert all(each.dtype == np.float32 for each in found)
    return [each.tolist() for each in found]


def test_each_position_scores_the_next_token(server: ScoringServer) -> None:
    expected = [
        [log_prob_of(tokens, at) for at in range(1, len(tokens))] + [0.0] for tokens in SAMPLES
    ]
    assert scores(server) == expected
    assert all(request["temperature"] == 1.0 for request in server.requests)


def test_failed_requests_are_repeated_until_the_deadline(server: ScoringServer) -> None:
    expected = scores(server)
    server.num_to_fail = 5
    assert scores(server) == expected
    server.num_to_fail = 10**6
    with pytest.raises(ScoringFailed, match="HTTP status 503: .*starting"):
        scores(server, wait_seconds=0.2)


def test_a_refused_request_is_not_repeated_and_a_secret_is_not_shown(server: ScoringServer) -> None:
    server.status, server.answer = 400, {"error": "Bearer of secrets"}
    with pytest.raises(ScoringFailed, match="Bearer of secrets"):
        scores(server)
    num_requests = len(server.requests)
    assert num_requests <= len(SAMPLES)
    with pytest.raises(ScoringFailed) as failed:
        scores(server, Authorization="Bearer of secrets")
    assert "Bearer" not in str(failed.value)
    # Requests of the first call may arrive after those of the second.
    sent = [headers.get("Authorization") for headers in server.headers]
    assert "Bearer of secrets" in sent


def _entries(*entries: Any) -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": [None, *entries]}]}


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"choices": []},
        _entries(),
        _entries({"1": {"logprob": -1}}),
        _entries({"1": {"logprob": -1}}, {"4": {"logprob": -1}}, {"7": {"logprob": -1}}),
        _entries({"1": {"logprob": -1}}, {"4": {"logprob": -9999}}, {"1": {"logprob": -1}}),
        _entries({"1": {"logprob": -1}}, {"4": {"logprob": 0.5}}, {"1": {"logprob": -1}}),
        _entries({"1": {"logprob": -1}}, {"4": {"logprob": "nan"}}, {"1": {"logprob": -1}}),
        _entries({"1": {"logprob": -1}}, None, {"1": {"logprob": -1}}),
    ],
)
def test_no_wrong_answer_is_believed(answer: Any, server: ScoringServer) -> None:
    server.answer = answer
    with pytest.raises(ScoringFailed, match="answer has"):
        PromptScores(server.url, {}).log_probs(SAMPLES[:1], 60)


@pytest.mark.parametrize(
    "answer",
    [5, None, [1], {}, {"data": 5}, {"data": True}, {"data": [5]}, {"data": {"a": 1}}, {"data": []}]
    + [{"data": [{"max_model_len": each}]} for each in ("x", 1e999, -1, [4], None, 10**400)],
)
def test_models_of_another_form_are_no_length_or_a_failure(
    answer: Any, server: ScoringServer
) -> None:
    server.models = answer
    with contextlib.suppress(HTTPFailure):
        assert PromptScores(server.url, {}).max_tokens() is None
    server.models = {"data": [{"id": "teacher", "max_model_len": 4096}]}
    assert PromptScores(server.url, {}).max_tokens() == 4096


@pytest.mark.parametrize("answer", [5, [], {}, {"tokens": 5}, {"tokens": ["a"]}, {"tokens": [1.5]}])
def test_tokens_of_another_form_are_a_failure(answer: Any, server: ScoringServer) -> None:
    server.tokens = answer
    with pytest.raises(HTTPFailure, match="list of tokens"):
        PromptScores(server.url, {}).tokens_of("text")
    server.tokens = {"tokens": [1, 2]}
    assert PromptScores(server.url, {}).tokens_of("text") == [1, 2]


def test_any_answer_is_scores_or_a_failure(server: ScoringServer) -> None:
    tokens = SAMPLES[0].tolist()
    sound = _entries(*({str(token): {"logprob": -1.0}} for token in tokens[1:]))

    @settings(hostile.BOUNDED, max_examples=30)
    @given(hostile.changed(sound))
    def check(answer: Any) -> None:
        with contextlib.suppress(HTTPFailure):
            found = prompt_scores.log_probs_in(answer, tokens)
            assert len(found) == 3 and all(-9999 < each <= 1e-6 for each in found)

    check()


def tokenizer(folder: Path, **changed: int) -> Path:
    folder.mkdir()
    vocabulary = {"a": 0, "b": 1, "c": 2} | changed
    contents = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 3, "content": "<end>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    return folder


def test_a_teacher_may_have_more_tokens_but_no_other_ones(tmp_path: Path) -> None:
    actor = tokenizer(tmp_path / "actor")
    check_same_vocabulary(tokenizer(tmp_path / "more", d=4), actor, num_rows=4)
    with pytest.raises(UsageError, match="'b' is token 1 .* has 7"):
        check_same_vocabulary(tokenizer(tmp_path / "other", b=7), actor, num_rows=8)
    with pytest.raises(UsageError, match="'d' is token 4 .* lacks it"):
        check_same_vocabulary(actor, tokenizer(tmp_path / "larger", d=4), num_rows=8)
    with pytest.raises(UsageError, match="vocabulary of 3, and token 3 is one of the actor's"):
        check_same_vocabulary(tokenizer(tmp_path / "small"), actor, num_rows=3)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), None)


def in_other_files(folder: Path, source: Path, *, reverses: bool = False) -> Path:
    """The tokenizer of `source` as vocab.json and merges.txt, as Qwen2 and GPT-2 publish it."""
    folder.mkdir()
    contents = json.loads((source / "tokenizer.json").read_text())
    vocabulary = contents["model"]["vocab"]
    if reverses:
        vocabulary = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    added = {str(each["id"]): each for each in contents["added_tokens"]}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added}
    settings |= dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<bos>")
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_tokenizers_of_other_files_are_compared_or_the_teacher_is_refused(
    byte_tokenizer: Path, tmp_path: Path
) -> None:
    for files in ("same", "other"):
        folder = in_other_files(tmp_path / files, byte_tokenizer, reverses=files == "other")
        for teacher, actor in ((folder, byte_tokenizer), (byte_tokenizer, folder)):
            if files == "same":
                check_same_vocabulary(teacher, actor, num_rows=400)
                continue
            with pytest.raises(UsageError, match="has another tokenizer"):
                check_same_vocabulary(teacher, actor, num_rows=400)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UsageError, match=f"{tmp_path}/none has a tokenizer that cannot be compa"):
        check_same_vocabulary(tmp_path / "none", byte_tokenizer, num_rows=400)


@pytest.mark.slow
def test_server_whose_tokenizer_is_another_one_or_cannot_be_compared_is_refused(
    byte_tokenizer: Path,
) -> None:
    def checked(url: str) -> list[str]:
        config = RLConfig.of(teacher=url, max_prompt_tokens=8, max_response_tokens=7)
        checkpoint = SimpleNamespace(folder=byte_tokenizer)
        spec: Any = SimpleNamespace(config=config, checkpoint=checkpoint, trust_remote_code=False)
        return check_teacher_servers(spec)

    with scoring_server(byte_tokenizer) as server:
        assert checked(server.url) == []
        server.models = {"data": [{"max_model_len": 15}]}
        with pytest.raises(UsageError, match="takes 15 tokens.*--max-model-len 16"):
            checked(server.url)
        server.models = {"data": [{"max_model_len": 16}]}
        encode = server.encode
        for answer, why in (
            ({"tokens": [1]}, "has another tokenizer"),
            ({}, "cannot be compared .*/tokenize: .*--skip-tokenizer-init"),
            (None, "cannot be compared .*/tokenize: HTTP status 404"),
        ):
            server.encode = lambda text, answer=answer: answer  # type: ignore[misc]
            with pytest.raises(UsageError, match=why):
                checked(server.url)
        server.encode = encode
        server.models = {"data": 5}
        (line,) = checked(server.url)
        assert line.startswith(f"the length that {server.url} takes is not checked: answer has an")
    (line,) = checked(server.url)  # it may still start
    assert line.startswith(f"{server.url} is not checked: ")


def test_tokens_that_a_teacher_lacks_are_read_as_another_one() -> None:
    batch = one_step()[0].actor
    ids = batch.token_ids.clone()
    ids[[1, 3]] = torch.tensor([7, 9], dtype=ids.dtype)
    found, is_lacked = known_to(8, dataclasses.replace(batch, token_ids=ids))
    assert is_lacked.nonzero().flatten().tolist() == [3]
    ids[3] = 0
    assert torch.equal(found.token_ids, ids)


class Constant(Teacher):
    """Says one number of every token, and notes its samples."""

    def __init__(self, value: float) -> None:
        self.value, self.samples = value, None

    def divide(self, sample_store: Any, table: SampleTable, samples: np.ndarray) -> None:
        self.samples = samples.tolist()

    def begin(self, batch: StepBatch) -> Callable[[], torch.Tensor]:
        return lambda: torch.full((batch.actor.num_tokens, 1), self.value)


def one_step() -> tuple[StepBatch, SampleTable]:
    """Four samples of 11 tokens 0."""
    lengths = np.array([3, 2, 4, 2])
    table = SampleTable.of_lengths(lengths - 1, np.ones(4, dtype=np.int64))
    batching = MicroBatching(max_tokens=16, micro_batch_size=1, multiple_of=1)
    epochs = plan_epochs(table, num_mini_batches=1, dp_size=1, batching=batching)
    tokens = {
        row: SampleTokens(np.zeros(n, np.int32), np.ones(n, np.bool_), np.zeros(n, np.float32))
        for row, n in enumerate(lengths)
    }
    batch = batch_by_plan(table, tokens, epochs, 0)
    return StepBatch(batch, division_of(epochs, lengths, ((0,),)), None), table


def test_each_sample_has_the_scores_of_its_own_teacher() -> None:
    step, table = one_step()
    batch = step.actor
    numbers = np.array([0, 2, -1, 0])
    teachers = [Constant(-1.0), Constant(-2.0), Constant(-3.0)]
    of_step = StepTeachers(teachers, lambda _: numbers)
    of_step.divide(None, table)
    assert [each.samples for each in teachers] == [[0, 3], None, [1]]
    found = of_step.begin(step)()[:, 0].split(batch.lengths.tolist())
    mask = of_step.mask(batch)
    assert mask is not None
    masks = mask.split(batch.lengths.tolist())
    for sample, scores, is_learned in zip(batch.sample_ids.tolist(), found, masks, strict=True):
        expected = -1.0 - numbers[sample] if sample != 2 else 0.0
        assert set(scores.tolist()) == {expected} and set(is_learned.tolist()) == {sample != 2}
    nobody = StepTeachers(teachers, lambda _: np.full(4, -1))
    nobody.divide(None, table)
    assert not nobody.begin(step)().any() and not nobody.mask(batch).any()
    everybody = StepTeachers(teachers)
    everybody.divide(None, table)
    assert everybody.mask(batch) is None


def planned(teacher: str, *more: str) -> Case:
    """The plan's case of Qwen3-30B-A3B that learns from another model on 16 ranks."""
    flags = "--world-size 16 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
    flags += "--expert-model-parallel-size 4"
    actor = ("--hf-config", str(CONFIGS / "qwen3-30b-a3b.json"))
    learns = ("--rl-teacher", str(CONFIGS / f"{teacher}.json"))
    return read_command_line([*actor, *flags.split(), *learns, *more]).case


def test_a_plan_counts_a_teacher_on_the_actors_ranks() -> None:
    """One of the actor's shape is in host memory, another one on the devices, in all phases."""
    swapped = planned("qwen3-30b-a3b")
    weights = max(held["weights"] for held in stage_state(swapped.actor))
    memory = memory_of(swapped, resident_of(swapped))
    assert memory.host_bytes["teacher's weights"] == weights * swapped.machine.ranks_per_node
    assert not any("teacher weights" in phase.parts for phase in memory.phases)
    # It scores as the actor does, without the entropy, and keeps the scores of the step.
    kept = score_bytes(swapped, swapped.actor)
    assert memory.phase(SCORES).total_bytes <= memory.phase(LOG_PROBS).total_bytes + kept
    other = planned("gpt-oss-20b")
    memory = memory_of(other, resident_of(other))
    assert "teacher's weights" not in memory.host_bytes
    of_stages = {held["weights"] for held in stage_state(other.teachers[0])}
    assert {phase.parts["teacher weights"] for phase in memory.phases} <= of_stages


def test_a_plan_counts_all_teachers() -> None:
    """Two are swapped into the actor's model, and one has a model of its own."""
    swapped, other = planned("qwen3-30b-a3b"), planned("gpt-oss-20b")
    (like_actor,), (own,) = swapped.teachers, other.teachers
    teachers = (own, *(dataclasses.replace(like_actor, name=f"teacher {n}") for n in (2, 3)))
    case = dataclasses.replace(swapped, teachers=teachers)
    memory, alone = memory_of(case, resident_of(case)), memory_of(other, resident_of(other))
    of_one = memory_of(swapped, resident_of(swapped)).host_bytes["teacher's weights"]
    assert memory.host_bytes["teacher's weights"] == 2 * of_one
    assert (
        memory.phase(TRAIN).parts["teacher weights"] == alone.phase(TRAIN).parts["teacher weights"]
    )
    assert [phase.name for phase in memory.phases].count(SCORES) == 2  # by the actor, and by `own`


def test_a_plan_counts_a_teacher_on_its_own_ranks() -> None:
    apart = planned("gpt-oss-20b", "--rl-teacher-ranks", "0-7", "--rl-teacher-ep-size", "2")
    assert apart.train.world_size == apart.teachers[0].train.world_size == 8
    memory = memory_of(apart, resident_of(apart))
    of_teacher = {BUILD_TEACHER, SCORES}
    for phase in memory.phases:
        assert ("teacher weights" in phase.parts) == (phase.name in of_teacher), phase.name
        assert ("weights" in phase.parts) == (phase.name not in (*of_teacher, START))
    assert as_json(plan_case(apart))["world_size"] == 16
    one_node = dataclasses.replace(apart.machine, ranks_per_node=16)
    on_one_node = dataclasses.replace(apart, machine=one_node)
    phases = host_phases(on_one_node, kv_cache_bytes=0, widens=False)
    on_cpus = {phase.name: phase for phase in phases}
    of_stages = stage_state(apart.teachers[0])
    weights = sum(held["weights"] for held in of_stages) * 4  # ranks of a stage
    assert on_cpus[SCORES].parts["teacher weights"] == weights
    # A device that its weights do not fit.
    small = dataclasses.replace(
        apart,
        machine=dataclasses.replace(apart.machine, gpu_bytes=3 * GB, reserved_bytes=0),
        engine=dataclasses.replace(apart.engine, gpu_memory_utilization=0.1),
    )
    phases = {phase.name: phase for phase in memory_of(small, resident_of(small)).phases}
    assert phases[BUILD_TEACHER].surely_lacking_bytes > 0


def test_a_plan_counts_what_a_loss_takes_of_a_teacher() -> None:
    case = planned("qwen3-30b-a3b")
    token = {phase.name: phase for phase in memory_of(case, resident_of(case)).phases}
    tokens = case.engine.sampled_tokens_in_all // case.train.dp_size
    for form, outputs in (("topk", 2 * 64), ("full", case.shape.hidden_size)):
        other = planned("qwen3-30b-a3b", "--rl-teacher-form", form)
        memory = memory_of(other, resident_of(other))
        # The results are joined on the last stage, which for `full` also has the teacher's head.
        forward = log_prob_activation_bytes(other.actor, with_entropy=False)[-1]
        results = 4 * (2 + outputs) * tokens
        scores = memory.phase(SCORES)
        assert scores.parts["activations"] == results + max(forward, results)
        head = max(teacher_head_bytes(other.actor))
        assert scores.parts.get("teacher weights", 0) == head
        assert (head > 0) == (form == "full")
        training = other.training
        in_mini_batch = 4 * outputs * training.num_micro_batches * training.micro_batch_tokens
        assert memory.phase(TRAIN).total_bytes - token[TRAIN].total_bytes >= in_mini_batch
        per_rank = 2 * 4 * (1 + outputs) * tokens
        ranks = case.machine.ranks_per_node
        assert memory.host_bytes["teacher's scores"] == per_rank * ranks


def test_a_teacher_follows_the_actor_into_another_layout() -> None:
    for name in ("qwen3-30b-a3b", "gpt-oss-20b"):
        case = planned(name)
        wider = TrainLayout(16, tp_size=2, pp_size=2, ep_size=4)
        other = with_train_layout(case, wider, case.layers)
        assert other.teachers[0].train == wider
        assert other.num_swapped == case.num_swapped == (name == "qwen3-30b-a3b")
