"""Reward functions of a user's file (`--rl-import`), and several functions in one pool."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.isolation.wire import Answer
from mcore_rl.rewards.functions import exact_match, resolve_reward, reward
from mcore_rl.rewards.pool import RewardPool, _Worker, check_rewards
from mcore_rl.rewards.stack import RewardStack
from tests.reward_server import responses
from tests.reward_specs import rewards_of

# Registered names outlive a test, so only this file uses these.
FILE = """
import os, sys
from mcore_rl.rewards.functions import reward

@reward("imports_length")
def length(*, prompt, response, answer):
    return len(response)

@reward("imports_pid")
def pid(*, prompt, response, answer):
    return os.getpid()

@reward("imports_torch")
def torch(*, prompt, response, answer):
    return "torch" in sys.modules
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imports") / "my rewards.py"
    path.write_text(FILE)
    return path


def test_workers_resolve_names_of_imported_files(file):
    spec = rewards_of("imports_length,exact_match,imports_torch", imports=[str(file)])
    check_rewards(spec)
    with RewardStack(spec) as stack:
        scored = stack.score(responses("7", "seven"))
    assert [s.failure for s in scored] == [None, None]
    assert [s.reward for s in scored] == [2.0, 5.0]
    assert scored[0].parts == {"imports_length": 1.0, "exact_match": 1.0, "imports_torch": 0.0}


def test_workers_find_a_relative_file_from_another_working_directory(file, tmp_path, monkeypatch):
    monkeypatch.chdir(file.parent)
    spec = rewards_of("imports_length", imports=[file.name])
    with RewardStack(spec) as stack:
        monkeypatch.chdir(tmp_path)
        assert stack.score(responses("abc"))[0].reward == 3.0


def test_file_given_twice_is_imported_once(file, tmp_path):
    link = tmp_path / "link.py"
    link.symlink_to(file)
    spec = rewards_of("imports_length", imports=[str(file), str(file), str(link)])
    check_rewards(spec)
    check_rewards(spec)
    with RewardStack(spec) as stack:
        assert stack.score(responses("abc"))[0].reward == 3.0


def test_imported_file_can_also_be_named_as_a_module(tmp_path, monkeypatch):
    path = tmp_path / "imports_twice.py"
    path.write_text(FILE.replace("imports_", "twice_"))
    monkeypatch.syspath_prepend(tmp_path)
    spec = rewards_of("twice_length,imports_twice:length", imports=[str(path)])
    check_rewards(spec)
    with RewardStack(spec) as stack:
        assert stack.score(responses("abc"))[0].reward == 6.0


@pytest.mark.slow
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
def test_failing_import_names_the_file(tmp_path, text, message):
    path = tmp_path / "fails.py"
    path.write_text("from mcore_rl.rewards.functions import reward\n" + text)
    spec = rewards_of("exact_match", imports=[str(path)])
    with pytest.raises(UsageError, match="fails.py.*" + message):
        check_rewards(spec)
    with RewardStack(spec) as stack, pytest.raises(UsageError, match="fails.py.*" + message):
        stack.score(responses("7"))


def test_registered_function_with_wrong_parameters_is_refused(tmp_path):
    path = tmp_path / "parameters.py"
    path.write_text(
        "from mcore_rl.rewards.functions import reward\n"
        "@reward('imports_two')\ndef f(prompt, response): return 1\n"
    )
    with pytest.raises(UsageError, match="--rl-reward imports_two has the parameters"):
        check_rewards(rewards_of("imports_two", imports=[str(path)]))


def test_unknown_name_lists_imported_and_built_in_names(file):
    spec = rewards_of("imports_lenght", imports=[str(file)])
    with pytest.raises(UsageError, match="did you mean imports_length.*those of --rl-import are"):
        check_rewards(spec)
    with pytest.raises(UsageError) as caught:
        resolve_reward("gms8k")
    assert "the built-in ones are arithmetic, exact_match, gsm8k, " in str(caught.value)


def test_reward_can_be_registered_again_from_the_same_line_only():
    for _ in range(2):
        assert reward("imports_same_line")(exact_match) is exact_match
    with pytest.raises(ValueError, match="imports_same_line"):
        reward("imports_same_line")(exact_match)


# Several functions, one pool ----------------------------------------------------------------------


def test_functions_share_the_processes_of_one_pool(file):
    specs = ("imports_pid", "imports_length", "exact_match")
    with RewardStack(
        rewards_of(
            ",".join(specs), reward_workers=2, reward_timeout_seconds=10, imports=[str(file)]
        )
    ) as pool:
        outcomes = pool.outcomes(responses(*["7"] * 30))
        assert list(outcomes) == list(specs)
        assert len({outcome.reward for outcome in outcomes["imports_pid"]}) <= 2
        assert [o.reward for name in specs[1:] for o in outcomes[name]] == [1.0] * 60


@pytest.mark.slow
def test_time_limit_applies_to_each_function(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(
        "import time\nfrom mcore_rl.rewards.functions import reward\n"
        + "".join(
            f"@reward('slow_{i}')\ndef f{i}(**_):\n    time.sleep(1.1)\n    return {i}\n"
            for i in range(3)
        )
    )
    names = "slow_0,slow_1,slow_2"
    spec = rewards_of(names, reward_timeout_seconds=3.0, imports=[str(path)])
    with RewardStack(spec) as stack:
        started = time.monotonic()
        (scored,) = stack.score(responses("7"))
        assert time.monotonic() - started > 3.3
    assert (scored.failure, scored.reward) == (None, 3.0)


def sources(names: str, folder: Path, **texts: str) -> dict[str, str]:
    """What a new process finds, with these texts in files of the folder."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    imports = [str(folder / "grading.py")] if "grading" in texts else ()
    with RewardStack(rewards_of(names, imports=imports)) as stack:
        assert stack.sources().keys() == set()
        return stack.find_sources()


def test_changed_code_of_a_reward_changes_its_source(tmp_path, monkeypatch):
    """Wherever the code is: in the file itself, or in one that it imports."""
    monkeypatch.chdir(tmp_path)
    grade = "def grade(*, prompt, response, answer):\n    return {}\n"
    mine = "import shared_scale\ndef grade(*, prompt, response, answer):\n    return {}\n"
    first = sources("graded:grade,gsm8k", tmp_path, graded=grade.format(1))
    assert sources("graded:grade,gsm8k", tmp_path) == first
    changed = sources("graded:grade,gsm8k", tmp_path, graded=grade.format(2))
    assert changed["graded:grade"] != first["graded:grade"]
    one, two = (
        sources("graded:grade", tmp_path, graded=mine, shared_scale=f"scale = {scale}\n")
        for scale in (1, 2)
    )
    assert one["graded:grade"] != two["graded:grade"]


def test_changed_file_of_imports_changes_the_sources_of_its_rewards(tmp_path):
    named = FILE.replace("imports_", "sourced_")
    first, second = (
        sources("sourced_length", tmp_path, grading=f"{named}# {n}\n") for n in range(2)
    )
    assert first.keys() == second.keys() == {"sourced_length"} and first != second


def test_reward_whose_file_has_changed_between_two_workers_has_no_source():
    pool = RewardPool(rewards_of("gsm8k"))
    for digest, known in (
        ("a" * 64, "a" * 64),
        ("a" * 64, "a" * 64),
        ("b" * 64, ""),
        ("b" * 64, ""),
    ):
        pool._take_start(_Worker(0), Answer({"gsm8k": digest}))
        assert pool.sources == {"gsm8k": known}
    pool.close()


def test_reward_at_another_address_is_another_one():
    first, second = (
        rewards_of("http", reward_url=f"http://127.0.0.1:9/{judge}") for judge in ("a", "b")
    )
    with RewardStack(first) as one, RewardStack(second) as two:
        assert one.find_sources().keys() == {"http"}
        assert one.find_sources() != two.find_sources()
