"""Reward functions of a user's file (`--rl-import`), and several functions in one pool."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.common.errors import UsageError
from mcore_rl.rewards.functions import exact_match, resolve_reward, reward
from mcore_rl.rewards.pool import RewardPool, check_rewards
from mcore_rl.rewards.specs import parse_rewards
from mcore_rl.rewards.stack import RewardStack

# Names are of this test alone: they stay registered as long as the process lives.
FILE = """
import os, sys, time
from mcore_rl.rewards.functions import reward

@reward("imports_length")
def length(*, prompt, response, answer):
    return len(response)

@reward("imports_pid")
def pid(*, prompt, response, answer):
    if response == "hang":
        time.sleep(600)
    if response == "die":
        os._exit(1)
    return os.getpid()

@reward("imports_torch")
def torch(*, prompt, response, answer):
    return "torch" in sys.modules
"""


def rollouts(*texts: str) -> list[Rollout]:
    none = np.zeros(0, np.float32)
    prompt = Prompt(0, "question", "7", none.astype(np.int32))
    return [
        Rollout(prompt, i, t, none.astype(np.int32), none, "stop", 0) for i, t in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imports") / "my rewards.py"
    path.write_text(FILE)
    return path


def test_workers_know_the_names_of_imported_files(file):
    spec = parse_rewards("imports_length,exact_match,imports_torch", imports=[str(file)])
    check_rewards(spec)
    with RewardStack(spec) as stack:
        scored = stack.score(rollouts("7", "seven"))
    assert [s.failure for s in scored] == [None, None]
    assert [s.reward for s in scored] == [2.0, 5.0]
    assert scored[0].parts == {"imports_length": 1.0, "exact_match": 1.0, "imports_torch": 0.0}


def test_workers_find_a_relative_file_from_another_working_directory(file, tmp_path, monkeypatch):
    monkeypatch.chdir(file.parent)
    spec = parse_rewards("imports_length", imports=[file.name])
    with RewardStack(spec) as stack:
        monkeypatch.chdir(tmp_path)
        assert stack.score(rollouts("abc"))[0].reward == 3.0


def test_a_file_may_be_given_twice(file, tmp_path):
    link = tmp_path / "link.py"
    link.symlink_to(file)
    spec = parse_rewards("imports_length", imports=[str(file), str(file), str(link)])
    check_rewards(spec)
    check_rewards(spec)
    with RewardStack(spec) as stack:
        assert stack.score(rollouts("abc"))[0].reward == 3.0


def test_a_file_may_be_a_module_as_well(tmp_path, monkeypatch):
    path = tmp_path / "imports_twice.py"
    path.write_text(FILE.replace("imports_", "twice_"))
    monkeypatch.syspath_prepend(tmp_path)
    spec = parse_rewards("twice_length,imports_twice:length", imports=[str(path)])
    check_rewards(spec)
    with RewardStack(spec) as stack:
        assert stack.score(rollouts("abc"))[0].reward == 6.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("@reward('gsm8k')\ndef f(**_): return 1\n", "two reward functions are called 'gsm8k'"),
        ("@reward('bad_a')\ndef f(**_): return 1\n" * 2, "two reward functions are called 'bad_a'"),
        ("@reward('http')\ndef f(**_): return 1\n", "'http' is the reward of a server"),
        ("@reward('pooling')\ndef f(**_): return 1\n", "'pooling' is the reward of a server"),
        ("@reward('a,b')\ndef f(**_): return 1\n", "cannot be called 'a,b'"),
        ("@reward('a:b')\ndef f(**_): return 1\n", "cannot be called 'a:b'"),
        ("@reward('a b')\ndef f(**_): return 1\n", "cannot be called 'a b'"),
        ("@reward('')\ndef f(**_): return 1\n", "cannot be called ''"),
        ("raise OSError('no licence file')\n", "OSError: no licence file"),
    ],
)
def test_a_file_that_fails_is_an_error_that_names_it(tmp_path, text, message):
    path = tmp_path / "fails.py"
    path.write_text("from mcore_rl.rewards.functions import reward\n" + text)
    spec = parse_rewards("exact_match", imports=[str(path)])
    with pytest.raises(UsageError, match="fails.py.*" + message):
        check_rewards(spec)
    with RewardStack(spec) as stack, pytest.raises(UsageError, match="fails.py.*" + message):
        stack.score(rollouts("7"))


def test_a_registered_function_is_called_with_three_keywords(tmp_path):
    path = tmp_path / "parameters.py"
    path.write_text(
        "from mcore_rl.rewards.functions import reward\n"
        "@reward('imports_two')\ndef f(prompt, response): return 1\n"
    )
    with pytest.raises(UsageError, match="--rl-reward imports_two has the parameters"):
        check_rewards(parse_rewards("imports_two", imports=[str(path)]))


def test_an_unknown_name_is_told_those_of_imported_files(file):
    spec = parse_rewards("imports_lenght", imports=[str(file)])
    with pytest.raises(UsageError, match="did you mean imports_length.*those of --rl-import are"):
        check_rewards(spec)
    with pytest.raises(UsageError) as caught:
        resolve_reward("gms8k")
    assert "the built-in ones are arithmetic, exact_match, gsm8k, " in str(caught.value)


def test_reward_may_be_registered_again_from_the_same_line_only():
    for _ in range(2):
        assert reward("imports_same_line")(exact_match) is exact_match
    with pytest.raises(ValueError, match="imports_same_line"):
        reward("imports_same_line")(exact_match)


# Several functions, one pool ----------------------------------------------------------------------


def test_functions_share_the_processes_of_one_pool(file):
    specs = ("imports_pid", "imports_length", "exact_match")
    with RewardPool(
        parse_rewards(",".join(specs), num_workers=2, timeout_seconds=10, imports=[str(file)])
    ) as pool:
        outcomes = pool.outcomes(rollouts(*["7"] * 30))
        assert list(outcomes) == list(specs)
        assert len({outcome.reward for outcome in outcomes["imports_pid"]}) <= 2
        assert [o.reward for name in specs[1:] for o in outcomes[name]] == [1.0] * 60


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("hang", "imports_pid: timed out: no value within 1 s"),
        ("die", "imports_pid: ended its process: exit code 1"),
    ],
)
def test_one_function_fails_and_the_others_of_the_sample_do_not(file, caplog, text, failure):
    spec = parse_rewards(
        "imports_length,imports_pid,exact_match", timeout_seconds=1.0, imports=[str(file)]
    )
    with RewardStack(spec) as stack:
        fine, bad, also_fine = stack.score(rollouts("7", text, "7"))
    assert (bad.reward, bad.failure) == (0.0, failure)
    assert bad.parts == {"imports_length": 4.0 if text == "hang" else 3.0, "exact_match": 0.0}
    assert fine.failure is None and also_fine.failure is None
    assert fine.parts["exact_match"] == also_fine.parts["exact_match"] == 1.0
    assert [m.startswith("reward imports_pid failed") for m in caplog.messages] == [True]


def test_each_function_has_a_time_of_its_own(tmp_path):
    """Together they take longer than one may."""
    path = tmp_path / "slow.py"
    path.write_text(
        "import time\nfrom mcore_rl.rewards.functions import reward\n"
        + "".join(
            f"@reward('slow_{i}')\ndef f{i}(**_):\n    time.sleep(0.6)\n    return {i}\n"
            for i in range(3)
        )
    )
    names = "slow_0,slow_1,slow_2"
    spec = parse_rewards(names, timeout_seconds=1.0, imports=[str(path)])
    with RewardStack(spec) as stack:
        started = time.monotonic()
        (scored,) = stack.score(rollouts("7"))
        assert time.monotonic() - started > 1.8
    assert (scored.failure, scored.reward) == (None, 3.0)
