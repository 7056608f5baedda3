"""What a reward can reach of the trainer: each test is a reward that tries, and fails."""

from __future__ import annotations

import os
import resource
import socket
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
from mcore_rl.common.errors import UsageError
from mcore_rl.isolation.spawn import process_environment
from mcore_rl.rewards.pool import RewardPool, check_rewards
from mcore_rl.rewards.specs import parse_rewards
from mcore_rl.rewards.stack import RewardStack

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "hush-aws",
    "HF_TOKEN": "hush-hf",
    "WANDB_API_KEY": "hush-wandb",
    "OPENAI_API_KEY": "hush-openai",
    "SSH_AUTH_SOCK": "hush-ssh",
    "PYTHON_API_TOKEN": "hush-python",
}

# Each sample's response says what is tried; what is found is told in the text of an exception.
SPY = """
import ctypes, glob, mmap, multiprocessing, os, pickle, re, resource, subprocess, sys, time

kept = []

class Command:
    def __reduce__(self):
        return exec, (f"open({MARKER!r}, 'w').close()",)

def spy(*, prompt, response, answer):
    if response == "environment":
        raise ValueError(" ".join(sorted(os.environ)) + "; " + " ".join(os.environ.values()))
    if response == "proc environment":
        raise ValueError(open("/proc/self/environ").read())
    if response == "trainer's environment":
        return float("hush" in open(f"/proc/{prompt}/environ").read())
    if response == "trainer's memory":
        return float(len(open(f"/proc/{prompt}/mem", "rb").read(1) or b"x"))
    if response == "own memory":
        secret = re.compile(rb"[h]ush-(aws|hf|wandb|openai|ssh)")  # does not find itself
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
            for line in maps:
                span, rights = line.split()[:2]
                if rights.startswith("rw") and "[v" not in line:
                    start, end = (int(part, 16) for part in span.split("-"))
                    memory.seek(start)
                    if secret.search(memory.read(end - start)):
                        raise ValueError(f"a secret in {line}")
        return 1.0
    if response == "descriptors":
        links = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                pass  # that of the listing itself
        raise ValueError(" ".join(f"{n}:{link}" for n, link in sorted(links.items()) if n > 2))
    if response == "limits":
        kinds = (resource.RLIMIT_DATA, resource.RLIMIT_CORE)
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
        except ValueError:  # it may not
            pass
        raise ValueError(str([resource.getrlimit(kind) for kind in kinds]))
    if response == "authkey":
        raise ValueError(multiprocessing.current_process().authkey.hex())
    if response == "tracker":
        from multiprocessing import resource_tracker
        raise ValueError(str(resource_tracker._resource_tracker._fd))
    if response == "eat":
        kept.append(bytearray(2 << 30))
    if response == "eat slowly":
        while True:
            kept.append("x" * (1 << 20))
    if response == "eat shared":
        kept.append(mmap.mmap(-1, 64 << 30))
    if response == "eat in C":
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        ctypes.memset(libc.malloc(ctypes.c_size_t(2 << 30)), 1, 2 << 30)
    if response == "hang":
        time.sleep(600)
    if response == "same group":
        return float(os.getpgid(0) == os.getpgid(int(prompt)))
    if response == "hang with a child":
        child = subprocess.Popen(["sleep", "600"], close_fds=False)
        with open({CHILD!r}, "w") as file:
            file.write(str(child.pid))
        time.sleep(600)
    if response == "pickle":
        # As long as a message, in every socket of this process, of which one ends in the trainer.
        text = pickle.dumps(Command())
        for name in os.listdir("/proc/self/fd"):
            try:
                if "socket" in os.readlink(f"/proc/self/fd/{name}") and int(name) > 2:
                    os.write(int(name), len(text).to_bytes(4, "big") + text)
            except OSError:
                pass
        return 1.0
    return len(kept)
"""


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marker") / "was_here"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, marker: Path) -> Path:
    folder = tmp_path_factory.mktemp("spies")
    text = SPY.replace("{MARKER!r}", repr(str(marker)))
    text = text.replace("{CHILD!r}", repr(str(folder / "child")))
    (folder / "a_spy.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        yield folder


@pytest.fixture(scope="module")
def pool(folder: Path) -> RewardPool:
    # More than the trainer's interpreter has, less than one that eats.
    with RewardPool(
        parse_rewards("a_spy:spy", num_workers=1, timeout_seconds=20, memory_gib=0.5)
    ) as pool:
        yield pool


def rollouts(*texts: str) -> list[Rollout]:
    none = np.zeros(0, np.float32)
    prompt = Prompt(0, str(os.getpid()), "7", none.astype(np.int32))
    return [
        Rollout(prompt, i, t, none.astype(np.int32), none, "stop", 0) for i, t in enumerate(texts)
    ]


def found(pool: RewardPool, what: str) -> str:
    failure = pool.score(rollouts(what))[0].failure
    assert failure is not None and failure.startswith("raised ValueError: "), failure
    return failure


# Secrets ------------------------------------------------------------------------------------------


def test_a_worker_has_no_secret_in_its_environment(pool):
    seen = found(pool, "environment")
    assert "PATH" in seen and "HOME" in seen
    assert "hush" not in seen and not [name for name in SECRETS if name in seen]


def test_a_worker_was_never_given_a_secret(pool):
    """What the kernel keeps of its start, which a fork would have had from the trainer."""
    seen = found(pool, "proc environment")
    assert "PATH=" in seen and "hush" not in seen


def test_a_worker_has_nothing_of_the_trainers_memory(pool):
    scored = pool.score(rollouts("own memory"))[0]
    assert (scored.failure, scored.reward) == (None, 1.0)


def has_landlock() -> bool:
    """Whether this kernel lets a process give up the sight of others."""
    import ctypes

    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1


@pytest.mark.skipif(not has_landlock(), reason="the kernel has no Landlock")
@pytest.mark.parametrize("what", ["environment", "memory"])
def test_a_worker_cannot_look_into_the_trainer(pool, what):
    (scored,) = pool.score(rollouts(f"trainer's {what}"))
    assert scored.failure is not None
    assert scored.failure.startswith("raised PermissionError"), scored.failure


def test_a_worker_gets_the_variables_that_are_named(folder):
    spec = parse_rewards("a_spy:spy", environment_names="HF_TOKEN")
    check_rewards(spec)
    with RewardStack(spec) as stack:
        seen = stack.score(rollouts("environment"))[0].failure
    assert seen is not None and "hush-hf" in seen
    assert not [value for value in SECRETS.values() if value != "hush-hf" and value in seen]


def test_process_environment_keeps_what_programs_need_and_nothing_that_looks_like_it():
    harmless = {"PATH": "/bin", "LC_ALL": "C", "TZ": "UTC", "PYTHONPATH": "/x", "TMPDIR": "/t"}
    others = {
        "PATHS": "1",
        "MY_PATH": "1",
        "PYTHONTOKEN": "1",
        "LD_PRELOAD": "x.so",
        "PASSWORD": "",
    }
    assert process_environment({**harmless, **others}) == harmless
    assert process_environment({**harmless, **others}, ["PATHS"]) == {**harmless, "PATHS": "1"}


def test_a_worker_has_no_descriptor_of_the_trainer(folder, tmp_path):
    """Files and sockets that a child could inherit, as those of libraries in C can be."""
    path = tmp_path / "of_the_trainer"
    with path.open("w") as file, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        for descriptor in (file.fileno(), listening.fileno()):
            os.set_inheritable(descriptor, True)
        with RewardPool(parse_rewards("a_spy:spy", num_workers=1, timeout_seconds=20)) as pool:
            seen = found(pool, "descriptors")
            assert found(pool, "tracker").endswith(" None")
    links = [link.partition(":")[2] for link in seen.removeprefix("raised ValueError: ").split()]
    assert len(links) == 1 and links[0].startswith("socket:")


def test_a_worker_does_not_know_the_key_of_the_trainers_processes(pool):
    import multiprocessing

    assert multiprocessing.current_process().authkey.hex() not in found(pool, "authkey")


def test_what_a_reward_writes_into_its_socket_is_not_run_and_costs_its_sample(folder, marker):
    with RewardPool(parse_rewards("a_spy:spy", num_workers=1, timeout_seconds=3)) as pool:
        found, others = pool.score(rollouts("pickle", "nothing"))
    assert not marker.exists()
    assert found.failure is not None and found.failure.startswith("wrote an invalid answer")
    assert others.failure is None


def test_a_signal_for_the_trainers_group_does_not_reach_a_worker(pool):
    """As torchrun sends, which a run may answer by ending its step first."""
    assert pool.score(rollouts("same group"))[0].reward == 0.0


def test_what_a_worker_has_started_ends_with_it(folder, tmp_path):
    with RewardPool(parse_rewards("a_spy:spy", num_workers=1, timeout_seconds=2)) as pool:
        slow, quick = pool.score(rollouts("hang with a child", ""))
        assert slow.failure is not None and slow.failure.startswith("timed out")
        assert quick.failure is None
        child = int((folder / "child").read_text())
        deadline = time.monotonic() + 120
        while psutil.pid_exists(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_a_module_whose_import_hangs_is_a_sentence(folder, monkeypatch):
    monkeypatch.setattr("mcore_rl.isolation.pool.START_SECONDS", 4.0)
    monkeypatch.setattr("mcore_rl.isolation.pool.MARGIN_SECONDS", 0.0)
    (folder / "a_sleepy_one.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(UsageError, match="a_sleepy_one:f cannot be used.*no answer within 4 s"):
        check_rewards(parse_rewards("a_sleepy_one:f"))


def test_a_module_of_rewards_is_not_imported_by_the_trainer(folder):
    check_rewards(parse_rewards("a_spy:spy"))
    assert "a_spy" not in sys.modules
    with pytest.raises(UsageError, match=r"no attribute 'spi' \(did you mean spy\?\)"):
        check_rewards(parse_rewards("a_spy:spi"))


def test_a_module_that_ends_its_process_is_a_sentence(folder):
    (folder / "a_deadly_one.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(UsageError, match="a_deadly_one:f cannot be used.*make its import work"):
        check_rewards(parse_rewards("a_deadly_one:f"))


# Memory and time ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["eat", "eat slowly", "eat shared"])
def test_a_reward_that_eats_memory_costs_its_sample(pool, how):
    scored = pool.score(rollouts("", how, ""))
    assert scored[1].failure == (
        "ran out of memory: its process may have 0.5 GiB (--rl-reward-memory-gib)"
    )
    # What it had kept is gone with its process.
    assert [s.reward for s in scored] == [0.0, 0.0, 0.0]
    assert [s.failure is None for s in scored] == [True, False, True]


def test_a_reward_that_eats_memory_in_c_ends_its_process(pool):
    scored = pool.score(rollouts("eat in C", ""))
    assert scored[0].failure is not None and "ended its process" in scored[0].failure
    assert scored[1].failure is None


def test_many_that_keep_a_little_are_scored_all(folder, tmp_path, monkeypatch):
    """Of a process that fills slowly the sample that hits the limit is scored again by itself."""
    (tmp_path / "a_leak.py").write_text(
        "kept = []\ndef leak(**_):\n    kept.append(bytearray(32 << 20))\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("mcore_rl.rewards.batches._BATCH_SECONDS", 5.0)
    with RewardPool(
        parse_rewards("a_leak:leak", num_workers=1, timeout_seconds=20, memory_gib=0.5)
    ) as pool:
        pool.score(rollouts(*["x"] * 4))
        scored: list[ScoredRollout] = pool.score(rollouts(*["x"] * 40))
    assert len([s for s in scored if s.failure is None]) >= 36


def test_limits_cannot_be_taken_back(pool):
    limits = found(pool, "limits")
    assert limits.endswith(f"[({1 << 29}, {1 << 29}), (0, 0)]")


def test_without_a_limit_memory_is_as_the_trainers(folder):
    with RewardPool(
        parse_rewards("a_spy:spy", num_workers=1, timeout_seconds=20, memory_gib=0)
    ) as pool:
        assert f"[{resource.getrlimit(resource.RLIMIT_DATA)}, (0, 0)]" in found(pool, "limits")


def test_numpy_starts_under_the_default_limit(folder, tmp_path, monkeypatch):
    from mcore_rl.rewards.options import RewardOptions

    (tmp_path / "a_big_import.py").write_text(
        "import numpy\ndef f(**_):\n    return float((numpy.ones((300, 300)) @ "
        "numpy.ones((300, 300)))[0, 0])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    gib = RewardOptions().reward_memory_gib
    with RewardPool(
        parse_rewards("a_big_import:f", num_workers=1, timeout_seconds=20, memory_gib=gib)
    ) as pool:
        assert pool.score(rollouts("x"))[0].reward == 300


def test_a_reward_that_hangs_costs_its_sample(folder):
    with RewardPool(parse_rewards("a_spy:spy", num_workers=1, timeout_seconds=3)) as pool:
        scored = pool.score(rollouts("hang", ""))
    assert scored[0].failure == "timed out: no value within 3 s"
    assert scored[1].failure is None


# Flags --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ("gsm8k", {"environment_names": "A,,B"}, "--rl-reward-env must be names"),
        ("gsm8k", {"environment_names": "hf_hush="}, "--rl-reward-env must be names"),
        ("model", {"environment_names": "HOME"}, "--rl-reward-env has no effect"),
    ],
)
def test_flags_that_cannot_work_are_a_sentence(rewards, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse_rewards(rewards, **options)
    assert "hush" not in str(caught.value)


def test_a_variable_that_is_not_set_is_a_sentence(monkeypatch):
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(
        UsageError, match="--rl-reward-env A_KEY names an environment variable that"
    ):
        check_rewards(parse_rewards("gsm8k", environment_names="A_KEY"))
