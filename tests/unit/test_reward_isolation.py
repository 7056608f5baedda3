"""Isolation of reward workers: each test is a reward that tries to reach the trainer, and fails."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.batching.types import Rollout
from mcore_rl.common.errors import UsageError
from mcore_rl.isolation.variables import process_environment
from mcore_rl.rewards.options import RewardOptions
from mcore_rl.rewards.pool import check_rewards
from mcore_rl.rewards.stack import RewardStack
from tests.reward_server import responses
from tests.reward_specs import rewards_of

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "hush-aws",
    "HF_TOKEN": "hush-hf",
    "WANDB_API_KEY": "hush-wandb",
    "OPENAI_API_KEY": "hush-openai",
    "SSH_AUTH_SOCK": "hush-ssh",
    "PYTHON_API_TOKEN": "hush-python",
}

# A sample's response selects the attempt; the message of an exception returns what it found.
SPY = """
import ctypes, mmap, multiprocessing, os, pickle, re, resource

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
    if response == "same group":
        return float(os.getpgid(0) == os.getpgid(int(prompt)))
    if response == "pickle":
        # With the length of a message, into every socket; one of them ends in the trainer.
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
    (folder / "a_spy.py").write_text(SPY.replace("{MARKER!r}", repr(str(marker))))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        yield folder


def new_pool(name: str = "a_spy:spy", *, timeout_seconds: float = 20, **options) -> RewardStack:
    spec = rewards_of(name, reward_workers=1, reward_timeout_seconds=timeout_seconds, **options)
    return RewardStack(spec)


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[RewardStack]:
    # More memory than an interpreter needs, less than the attempts below allocate.
    with new_pool(reward_memory_gib=0.5) as pool:
        yield pool


def attempt(*texts: str) -> list[Rollout]:
    return responses(*texts, prompt=str(os.getpid()))


def found(pool: RewardStack, what: str) -> str:
    failure = pool.score(attempt(what))[0].failure
    assert failure is not None and failure.startswith("raised ValueError: "), failure
    return failure


# Secrets ------------------------------------------------------------------------------------------


def test_worker_environment_has_no_secret(pool):
    seen = found(pool, "environment")
    assert "PATH" in seen and "HOME" in seen
    assert "hush" not in seen and not [name for name in SECRETS if name in seen]


def test_worker_was_started_without_secrets(pool):
    """The kernel keeps the environment of a process's start; a fork would have the trainer's."""
    seen = found(pool, "proc environment")
    assert "PATH=" in seen and "hush" not in seen


def test_worker_memory_has_no_secret(pool):
    scored = pool.score(attempt("own memory"))[0]
    assert (scored.failure, scored.reward) == (None, 1.0)


def has_landlock() -> bool:
    """Whether the kernel can restrict which processes another one sees."""
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1


@pytest.mark.skipif(not has_landlock(), reason="the kernel has no Landlock")
@pytest.mark.parametrize("what", ["environment", "memory"])
def test_worker_cannot_read_the_trainer(pool, what):
    (scored,) = pool.score(attempt(f"trainer's {what}"))
    assert scored.failure is not None
    assert scored.failure.startswith("raised PermissionError"), scored.failure


def test_worker_gets_only_the_variables_of_reward_env(folder, monkeypatch):
    monkeypatch.setenv("PATH", os.defpath)  # a long one would not leave room in the failure
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    spec = rewards_of("a_spy:spy", reward_env="HF_TOKEN")
    check_rewards(spec)
    with RewardStack(spec) as stack:
        seen = stack.score(attempt("environment"))[0].failure
    assert seen is not None and "hush-hf" in seen
    assert not [value for value in SECRETS.values() if value != "hush-hf" and value in seen]


def test_process_environment_keeps_only_harmless_and_named_variables():
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


def test_worker_inherits_no_descriptor(folder, tmp_path):
    """Not even those that are inheritable, as libraries in C may open them."""
    path = tmp_path / "of_the_trainer"
    with path.open("w") as file, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        for descriptor in (file.fileno(), listening.fileno()):
            os.set_inheritable(descriptor, True)
        with new_pool() as pool:
            seen = found(pool, "descriptors")
            assert found(pool, "tracker").endswith(" None")
    links = [link.partition(":")[2] for link in seen.removeprefix("raised ValueError: ").split()]
    assert len(links) == 1 and links[0].startswith("socket:")


def test_worker_does_not_know_the_trainers_authkey(pool):
    assert multiprocessing.current_process().authkey.hex() not in found(pool, "authkey")


def test_pickle_written_into_the_socket_fails_its_sample_and_is_not_run(folder, marker):
    with new_pool(timeout_seconds=3) as pool:
        found, others = pool.score(attempt("pickle", "nothing"))
    assert not marker.exists()
    assert found.failure is not None and found.failure.startswith("wrote an invalid answer")
    assert others.failure is None


def test_worker_is_not_in_the_trainers_process_group(pool):
    """torchrun sends such a signal, and a run may finish its step before it ends."""
    assert pool.score(attempt("same group"))[0].reward == 0.0


@pytest.mark.slow
def test_hanging_import_is_a_usage_error(folder, monkeypatch):
    monkeypatch.setattr("mcore_rl.isolation.pool.START_SECONDS", 4.0)
    monkeypatch.setattr("mcore_rl.isolation.session.MARGIN_SECONDS", 0.0)
    (folder / "a_sleepy_one.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(UsageError, match="a_sleepy_one:f .*no answer within 4 s"):
        check_rewards(rewards_of("a_sleepy_one:f"))


def test_reward_module_is_not_imported_by_the_trainer(folder):
    check_rewards(rewards_of("a_spy:spy"))
    assert "a_spy" not in sys.modules
    with pytest.raises(UsageError, match=r"no attribute 'spi' \(did you mean spy\?\)"):
        check_rewards(rewards_of("a_spy:spi"))


def test_import_that_ends_its_process_is_a_usage_error(folder):
    (folder / "a_deadly_one.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(UsageError, match="a_deadly_one:f cannot be used.*make its import work"):
        check_rewards(rewards_of("a_deadly_one:f"))


# Memory and time ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["eat", "eat slowly", "eat shared"])
def test_memory_limit_fails_only_its_sample(pool, how):
    scored = pool.score(attempt("", how, ""))
    assert scored[1].failure == (
        "ran out of memory: its process may have 0.5 GiB (--rl-reward-memory-gib)"
    )
    assert [s.reward for s in scored] == [0.0, 0.0, 0.0]
    assert [s.failure is None for s in scored] == [True, False, True]


def test_memory_limit_in_c_ends_the_process(pool):
    scored = pool.score(attempt("eat in C", ""))
    assert scored[0].failure is not None and "ended its process" in scored[0].failure
    assert scored[1].failure is None


@pytest.mark.slow
def test_slow_memory_leak_fails_few_samples(folder, tmp_path, monkeypatch):
    """A sample that hits the limit of a process that fills slowly is scored again alone."""
    (tmp_path / "a_leak.py").write_text(
        "kept = []\ndef leak(**_):\n    kept.append(bytearray(32 << 20))\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("mcore_rl.rewards.batches._BATCH_SECONDS", 5.0)
    with new_pool("a_leak:leak", reward_memory_gib=0.5) as pool:
        pool.score(attempt(*["x"] * 4))
        scored = pool.score(attempt(*["x"] * 40))
    assert len([s for s in scored if s.failure is None]) >= 36


def test_limits_cannot_be_raised(pool):
    limits = found(pool, "limits")
    assert limits.endswith(f"[({1 << 29}, {1 << 29}), (0, 0)]")


def test_memory_limit_of_0_keeps_the_trainers_limit(folder):
    with new_pool(reward_memory_gib=0) as pool:
        assert f"[{resource.getrlimit(resource.RLIMIT_DATA)}, (0, 0)]" in found(pool, "limits")


def test_numpy_starts_under_the_default_limit(folder, tmp_path, monkeypatch):
    (tmp_path / "a_big_import.py").write_text(
        "import numpy\ndef f(**_):\n    return float((numpy.ones((300, 300)) @ "
        "numpy.ones((300, 300)))[0, 0])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    gib = RewardOptions().reward_memory_gib
    with new_pool("a_big_import:f", reward_memory_gib=gib) as pool:
        assert pool.score(attempt("x"))[0].reward == 300


# Flags --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ("gsm8k", {"reward_env": "A,,B"}, "--rl-reward-env must be names"),
        ("gsm8k", {"reward_env": "hf_hush="}, "--rl-reward-env must be names"),
        ("model", {"reward_env": "HOME"}, "--rl-reward-env has no effect"),
    ],
)
def test_invalid_environment_flags_are_refused_without_showing_values(rewards, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        rewards_of(rewards, **options)
    assert "hush" not in str(caught.value)


def test_unset_variable_is_refused(monkeypatch):
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(
        UsageError, match="--rl-reward-env A_KEY names an environment variable that"
    ):
        check_rewards(rewards_of("gsm8k", reward_env="A_KEY"))
