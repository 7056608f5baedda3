"""Reward functions, and the pool that runs them in processes."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.rewards.batches import Batch
from mcore_rl.rewards.functions import arithmetic, exact_match, gsm8k, resolve_reward, reward
from mcore_rl.rewards.pool import RewardPool, check_functions
from mcore_rl.rewards.stack import RewardStack
from tests.processes import wait_until_all_have_ended
from tests.reward_server import rollouts
from tests.reward_specs import rewards_of

REPOSITORY = Path(__file__).parents[2]
GSM8K_TRAIN = REPOSITORY.parent / "shared/data/gsm8k/train.jsonl"

# The answer of a sample selects what the reward does; any other text is the value it returns.
USER_REWARD = """
import asyncio, os, signal, sys, threading, time

HEAVY = {"torch", "numpy", "megatron", "vllm", "transformers", "pyarrow", "mcore_rl.batching.types"}
loops = []

def raise_(error):
    raise error

ACTIONS = {
    "hang": lambda prompt, response: time.sleep(600),
    "slow": lambda prompt, response: time.sleep(1.5) or 1.0,
    "hang in C": lambda prompt, response: len(str(9 ** (9 ** 9))),
    "hang without alarm": lambda prompt, response: (signal.alarm(0), time.sleep(600)),
    "raise": lambda prompt, response: raise_(ValueError("cannot read " + response * 1000)),
    "exit": lambda prompt, response: sys.exit(3),
    "_exit": lambda prompt, response: os._exit(1),
    "_exit with 0": lambda prompt, response: os._exit(0),
    "segfault": lambda prompt, response: os.kill(os.getpid(), signal.SIGSEGV),
    "die when idle": lambda prompt, response: (
        threading.Timer(3.0, os._exit, [1]).start() or os.getpid()
    ),
    "True": lambda prompt, response: True,
    "texts": lambda prompt, response: float((prompt, response) == ("question", "7")),
    "SIGTERM": lambda prompt, response: signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    "pid": lambda prompt, response: os.getpid(),
    "heavy modules": lambda prompt, response: len(HEAVY & set(sys.modules)),
    "string": lambda prompt, response: "1.0",
    "none": lambda prompt, response: None,
}

def score(*, prompt, response, answer):
    if answer.startswith("async"):
        return later(response, answer)
    return ACTIONS[answer](prompt, response) if answer in ACTIONS else float(answer)

async def later(response, answer):
    await asyncio.sleep(0)
    if answer == "async hang":
        await asyncio.sleep(600)
    if answer == "async raise":
        raise ValueError("cannot await " + response * 1000)
    if answer == "async none":
        return None
    if answer == "async loop":
        loops.append(asyncio.get_running_loop())
        return float(loops[0] is loops[-1])
    return float(answer.removeprefix("async "))
"""


@pytest.fixture(scope="module")
def user_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards_of_a_user")
    (folder / "rewards_of_a_user.py").write_text(USER_REWARD)
    (folder / "broken_rewards.py").write_text("raise OSError('no licence file')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


def user_pool(*, timeout_seconds: float) -> RewardStack:
    spec = "rewards_of_a_user:score"
    return RewardStack(rewards_of(spec, reward_workers=2, reward_timeout_seconds=timeout_seconds))


@pytest.fixture(scope="module")
def pool(user_module):
    with pytest.MonkeyPatch.context() as patch:  # some calls escape their own timer
        patch.setattr("mcore_rl.isolation.session.MARGIN_SECONDS", 2.0)
        with user_pool(timeout_seconds=1) as pool:
            yield pool


@pytest.fixture(scope="module")
def patient_pool(user_module):
    """For calls that end by themselves, which must not time out on a busy machine."""
    with user_pool(timeout_seconds=60) as pool:
        yield pool


# The built-in functions ---------------------------------------------------------------------------


def call(function, response: str, answer: object) -> float:
    return function(prompt="", response=response, answer=answer)


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [(" a b\n", "a b", 1), ("a  b", "a b", 0), (" b ", ["a", "b"], 1), ("c", ["a", "b"], 0)],
)
def test_exact_match_ignores_outer_white_space_and_takes_any_of_a_list(response, answer, expected):
    assert call(exact_match, response, answer) == expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("7", "7", 1),
        ("3 + 4 = 7.\n", "7", 1),
        ("**7**", "7", 1),
        (r"\boxed{7}", "7", 1),
        ("007.0", "7", 1),
        ("It is 1,234,567.50", "1234567.5", 1),
        (".5", "0.5", 1),
        ("= -7", "-7", 1),
        ("= \N{MINUS SIGN}7", "-7", 1),
        ("7", "-7", 0),
        ("12-5", "5", 1),
        ("12-5", "-5", 0),
        ("7 8", "7", 0),
        ("7 apples", "7", 0),
        ("17", "7", 0),
        ("0.07", "7", 0),
        ("12,3456", "6", 0),
        ("seven", "7", 0),
        ("", "7", 0),
    ],
)
def test_arithmetic_reads_the_number_at_the_end(response, answer, expected):
    assert call(arithmetic, response, answer) == expected


GSM8K_ANSWER = "She sold 48+24 = <<48+24=72>>72 clips in all.\n#### 72"


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("So 48 + 24 = 72 clips.\n#### 72", GSM8K_ANSWER, 1),
        ("#### 72 clips in May and 5 in June", GSM8K_ANSWER, 1),
        ("#### 71\nNo, wait.\n#### 72.", GSM8K_ANSWER, 1),
        ("#### 72\nNo, wait.\n#### 71", GSM8K_ANSWER, 0),
        ("72\n#### no idea", GSM8K_ANSWER, 0),
        ("The answer is 72.", GSM8K_ANSWER, 1),
        ("72 is 48 plus 24", GSM8K_ANSWER, 0),
        ("#### 172", GSM8K_ANSWER, 0),
        ("", GSM8K_ANSWER, 0),
        ("#### $1,080.00", "It costs $1,080.\n#### 1,080", 1),
        (r"#### \$1080", "#### 1080", 1),
        ("#### 25%", "#### 25", 1),
        ("#### -$5", "#### -5", 1),
        ("#### 5", "#### -5", 0),
        ("#### 0.5", "0.50", 1),
    ],
)
def test_gsm8k_reads_marks_signs_and_separators(response, answer, expected):
    assert call(gsm8k, response, answer) == expected


@pytest.mark.parametrize("function", [arithmetic, gsm8k])
@pytest.mark.parametrize("answer", ["seven", "", "1 2", "#### ", {"value": 7}])
def test_numeric_rewards_refuse_an_answer_without_a_number(function, answer):
    with pytest.raises(ValueError, match="is not a number"):
        call(function, "7", answer)


@pytest.mark.parametrize("noise", ["1,", "1,111", "-", "$", ".1", "1.", "\\", "#", " ", "\r", "x"])
def test_numeric_rewards_read_long_responses(noise):
    """The search for numbers backtracks no further than the length of a number."""
    response = f"{noise * 20_000} so it is 7"
    for function in (arithmetic, gsm8k):
        assert (call(function, response, "7"), call(function, response, "8")) == (1.0, 0.0)


@pytest.mark.skipif(not GSM8K_TRAIN.exists(), reason=f"there is no {GSM8K_TRAIN}")
def test_gsm8k_pays_every_published_answer_and_no_other():
    answers = [json.loads(line)["answer"] for line in GSM8K_TRAIN.open()]
    assert [answer for answer in answers if call(gsm8k, answer, answer) != 1] == []
    results = [answer.rpartition("####")[2].strip() for answer in answers]
    assert [r for r in results if call(gsm8k, f"It is {r}.", r) != 1] == []
    assert [r for r in results if call(gsm8k, f"#### 1{r}", r) != 0] == []


# Finding a function -------------------------------------------------------------------------------


def test_resolve_reward_finds_built_in_and_user_functions(user_module):
    assert resolve_reward("gsm8k") is gsm8k
    assert resolve_reward("rewards_of_a_user:score").__module__ == "rewards_of_a_user"


def test_resolve_reward_finds_a_module_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "reward_in_cwd.py").write_text("def f(prompt, response, answer): return 1\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    assert resolve_reward("reward_in_cwd:f")(prompt="", response="", answer="") == 1


def test_resolve_reward_finds_a_function_in_a_file(tmp_path, monkeypatch):
    folder = tmp_path / "of rewards"
    folder.mkdir()
    (folder / "score.py").write_text(
        "def f(prompt, response, answer): return 1\n"
        "class Scorer:\n    @staticmethod\n    def f(prompt, response, answer): return 2\n"
    )
    monkeypatch.chdir(folder)
    before = list(sys.path)
    found = resolve_reward("./score.py:f")
    assert found(prompt="", response="", answer="") == 1
    for spec in (
        *("score.py:f", f"{folder}/score.py:f", "../of rewards/score.py:f"),
        *("score.py::f", "./score:f", " ./score.py : f ", "../of rewards/score::f"),
    ):
        assert resolve_reward(spec) is found
    assert resolve_reward("score.py:Scorer.f")(prompt="", response="", answer="") == 2
    assert sys.path == before
    check_functions(rewards_of("./score.py:f"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./no_such_file.py:f", "does not exist, seen from the working directory"),
        ("./rewards_of_a_user:f", "is not a .py file"),
        ("gms8k", r"--reward gms8k is not a built-in reward \(did you mean gsm8k\?\).*module"),
        ("Model", r"\(did you mean model\?\); .* pooling, model, environment, "),
        ("gsm8k=0.5", "is not a built-in reward; the built-in ones are"),
        ("no_such_module_here:f", "there is no module 'no_such_module_here'"),
        ("rewards_of_a_user.sub:f", "there is no module|rewards_of_a_user.sub"),
        ("broken_rewards:f", "importing 'broken_rewards' raised OSError: no licence file"),
        ("rewards_of_a_user:scor", r"no attribute 'scor' \(did you mean score\?\)"),
        ("rewards_of_a_user:", "has nothing behind its colon; write package.module:NAME"),
        (":score", "has nothing before its colon; write package.module:NAME"),
        ("rewards_of_a_user.score", r"did you mean rewards_of_a_user:score\?"),
        ("of/a/user.score", r"did you mean of/a/user.py:score\?"),
        ("of/a/user.py", r"did you mean of/a/user.py:NAME\?"),
        ("user.py.score", r"did you mean user.py:score\?"),
        ("user.py#score", r"did you mean user.py:score\?"),
        ("rewards_of_a_user:USER", "no attribute 'USER'"),
        ("os:sep", "--reward os:sep is of type str, which cannot be called"),
        ("os.path:join", r"has the parameters .* but is called as fn\(prompt="),
    ],
)
def test_resolve_reward_names_flag_and_remedy_when_it_cannot(user_module, spec, message):
    with pytest.raises(UsageError, match=message) as caught:
        resolve_reward(spec, flag="--reward")
    assert str(caught.value).startswith(f"--reward {spec} ")


def test_reward_refuses_a_name_that_is_taken():
    with pytest.raises(ValueError, match="gsm8k"):
        reward("gsm8k")(exact_match)


# The pool -----------------------------------------------------------------------------------------


def test_score_keeps_order_and_texts(pool):
    samples = rollouts("texts", *[str(i / 4) for i in range(100)], "True")
    scored = pool.score(samples)
    assert [s.rollout for s in scored] == samples
    assert [s.reward for s in scored] == [0.0, *[i / 4 for i in range(100)], 1.0]
    assert all(s.failure is None for s in scored)
    assert pool.score(rollouts(*["0"] * 7, "texts"))[7].reward == 1.0
    assert pool.score([]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ("hang", "timed out: no value within 1 s"),
        ("hang in C", "timed out: no value within 1 s"),
        ("hang without alarm", "timed out: no value within 1 s"),
        ("raise", "raised ValueError: cannot read " + "1" * 488 + " ..."),
        ("exit", "raised SystemExit: 3"),
        ("_exit", "ended its process: exit code 1"),
        ("_exit with 0", "ended its process: exit code 0"),
        ("segfault", "ended its process: SIGSEGV"),
        ("nan", "returned nan: a reward is a finite number"),
        ("inf", "returned inf: a reward is a finite number"),
        ("string", "returned str: a reward is a finite number"),
        ("none", "returned NoneType: a reward is a finite number"),
        ("async hang", "timed out: no value within 1 s"),
        ("async raise", "raised ValueError: cannot await " + "1" * 487 + " ..."),
        ("async none", "returned NoneType: a reward is a finite number"),
    ],
)
def test_failing_reward_fails_only_its_sample(pool, patient_pool, caplog, answer, failure):
    pool = pool if "within 1 s" in failure else patient_pool
    kind = failure.partition(":")[0]
    (log,) = pool.failure_logs.values()
    num_before = log.counts[kind]
    with caplog.at_level(logging.WARNING):
        scored = pool.score(rollouts("0.5", answer, "0.25", answer, *["0.125"] * 20))
    assert [s.reward for s in scored] == [0.5, 0.0, 0.25, 0.0, *[0.125] * 20]
    assert [i for i, s in enumerate(scored) if s.failure is not None] == [1, 3]
    assert scored[1].failure == failure
    assert log.counts[kind] == num_before + 2
    assert [failure in message for message in caplog.messages] == [True] * (num_before == 0)


def test_async_rewards_are_awaited_in_one_loop(pool):
    scored = pool.score(rollouts("async 0.5", "1", *["async loop"] * 8))
    assert [s.reward for s in scored] == [0.5, *[1.0] * 9]
    assert all(s.failure is None for s in scored)


@pytest.mark.slow
def test_score_starts_the_clock_when_a_sample_runs(pool):
    """The last sample waits for three times the limit."""
    scored = pool.score(rollouts(*["hang"] * 6, "1"))
    assert [s.reward for s in scored] == [0.0] * 6 + [1.0]


def test_workers_have_the_default_handler_of_sigterm(pool):
    assert pool.score(rollouts("SIGTERM"))[0].reward == 1.0


@pytest.mark.slow
def test_score_recovers_when_an_idle_worker_dies(pool):
    pid, one = (int(s.reward) for s in pool.score(rollouts("die when idle", "1")))
    assert one == 1
    wait_until_all_have_ended([pid])
    scored = pool.score(rollouts(*["1"] * 10))
    assert [s.reward for s in scored] == [1.0] * 10


def test_score_recovers_when_workers_are_killed_at_random(pool):
    """Only the samples that ran are lost."""
    pids = {int(s.reward) for s in pool.score(rollouts(*["pid"] * 50))}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    scored = pool.score(rollouts(*["1"] * 50))
    assert sum(s.reward for s in scored) >= 50 - len(pids)


def sent_batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """A list that receives each batch sent to a worker."""
    batches = []
    ask = RewardPool._ask

    def noting(self, worker, batch):
        batches.append(batch)
        ask(self, worker, batch)

    monkeypatch.setattr(RewardPool, "_ask", noting)
    return batches


@pytest.mark.slow
def test_samples_of_a_quick_reward_are_sent_in_batches(user_module, monkeypatch):
    # A sample of 1 s then counts as quick, which holds on a busy machine.
    monkeypatch.setattr("mcore_rl.rewards.batches._BATCH_SECONDS", 10.0)
    with user_pool(timeout_seconds=3) as pool:
        batches = sent_batches(monkeypatch)
        answers = [str(i / 4) for i in range(80)]
        expected = [float(answer) for answer in answers]
        assert [s.reward for s in pool.score(rollouts(*answers))] == expected
        assert len(batches[0]) == 1  # the time of one is not known yet
        assert sum(map(len, batches)) == 80
        batches.clear()
        assert [s.reward for s in pool.score(rollouts(*answers))] == expected
        assert list(map(len, batches)) == [10] * 8  # 4 batches for each worker

        # One sample exceeds the time of a batch, and one ends its process.
        batches.clear()
        answers[3], answers[77] = "slow", "segfault"
        expected[3], expected[77] = 1.0, 0.0
        scored = pool.score(rollouts(*answers))
        assert [s.reward for s in scored] == expected
        assert [i for i, s in enumerate(scored) if s.failure is not None] == [77]
        assert list(map(len, batches[:8])) == [10] * 8
        alone = sorted(ticket for batch in batches if batch.alone for ticket in batch.samples)
        assert alone == [*batches[0].samples, *batches[7].samples]

        batches.clear()
        assert sum(s.reward for s in pool.score(rollouts(*["1"] * 80))) == 80
        assert list(map(len, batches)) == [1] * 80  # no quick sample waits behind a slow one


def test_score_raises_usage_error_when_workers_cannot_resolve(user_module):
    with RewardStack(
        rewards_of("broken_rewards:f", reward_workers=1, reward_timeout_seconds=5)
    ) as broken:
        with pytest.raises(UsageError, match="no licence file"):
            broken.score(rollouts("1", "1"))


@pytest.mark.slow
def test_score_raises_when_workers_die_at_start(tmp_path, monkeypatch):
    (tmp_path / "deadly_reward.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with RewardStack(
        rewards_of("deadly_reward:f", reward_workers=1, reward_timeout_seconds=5)
    ) as deadly:
        with pytest.raises(RuntimeError, match="deadly_reward:f were started 3 times .*code 7"):
            deadly.score(rollouts("1", "1"))


def test_score_raises_after_close(user_module):
    with RewardStack(
        rewards_of("exact_match", reward_workers=1, reward_timeout_seconds=5)
    ) as closed:
        assert closed.score(rollouts("0", "0"))[0].reward == 1.0
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        closed.score(rollouts("0"))


TRAINER = """
import os, sys
with open("main_was_run", "a") as file:
    file.write(__name__ + " ")
import torch
from mcore_rl.rewards.stack import RewardStack
from tests.reward_server import rollouts
from tests.reward_specs import rewards_of

if __name__ == "__main__":
    main = sys.modules["__main__"]
    spec = main.__spec__
    function = "rewards_of_a_user:score"
    pool = RewardStack(rewards_of(function, reward_workers=2, reward_timeout_seconds=600))
    print(*[int(s.reward) for s in pool.score(rollouts("heavy modules", "pid", "pid"))])
    assert main.__spec__ is spec
"""


@pytest.fixture
def trainer_folder(user_module, tmp_path):
    (tmp_path / "trainer_script.py").write_text(TRAINER)
    return tmp_path


def trainer_environment(user_module: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{user_module}:{REPOSITORY}"}


@pytest.mark.slow
@pytest.mark.parametrize("how", [["trainer_script.py"], ["-m", "trainer_script"]])
def test_workers_import_neither_main_nor_torch(trainer_folder, user_module, how):
    run = subprocess.run(
        [sys.executable, *how],
        cwd=trainer_folder,
        env=trainer_environment(user_module),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[0] == "0"
    assert (trainer_folder / "main_was_run").read_text().split() == ["__main__"]
    # The script ended without closing its pool.
    wait_until_all_have_ended(map(int, run.stdout.split()[1:]))


ROW = {"data_source": "sums", "reward_model": {"ground_truth": ["a", "b"]}, "hint": None}
OF_THE_ROW = """
def of_row(*, prompt, response, answer, row):
    assert answer == ["a", "b"] and row == ROW, (answer, row)
    answer.clear()
    row.clear()  # a copy: the next sample of the prompt has its own
    return 1.0
def any_keyword(prompt, response, **more):
    assert sorted(more) == ["answer", "row"] and more["row"] == ROW
    return 1.0
def three(*, prompt, response, answer):
    return float(answer == ["a", "b"])
"""


def test_rewards_receive_every_column_and_answers_of_any_type(tmp_path, monkeypatch):
    (tmp_path / "of_the_row.py").write_text(f"ROW = {ROW!r}\n{OF_THE_ROW}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    prompt = Prompt(0, "question", ["a", "b"], np.zeros(1, np.int32), json.dumps(ROW))
    samples = [dataclasses.replace(each, prompt=prompt) for each in rollouts("0", "0", "0")]
    names = [f"of_the_row:{name}" for name in ("of_row", "any_keyword", "three")]
    with RewardStack(
        rewards_of(",".join(names), reward_workers=1, reward_timeout_seconds=20)
    ) as pool:
        for _ in range(2):  # one by one, and in batches
            for outcomes in pool.outcomes(samples).values():
                assert [(each.reward, each.failure) for each in outcomes] == [(1.0, None)] * 3
