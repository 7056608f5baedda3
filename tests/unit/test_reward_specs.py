"""What the `--rl-reward*` flags say, and the sentences for what cannot work."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.rewards.functions import reward
from mcore_rl.rewards.pool import check_rewards
from mcore_rl.rewards.specs import header_of, parse_rewards
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rewards.worker import Outcome
from mcore_rl.trainer.inputs import environment_spec, reward_spec

URL = "http://127.0.0.1:9/score"


def test_parse_rewards_aligns_names_and_weights():
    spec = parse_rewards("gsm8k, my.pkg:fn,http", "1,0.5, -0.1", url=URL, http_batch=7)
    assert spec.names == ("gsm8k", "my.pkg:fn", "http")
    assert spec.weights == (1.0, 0.5, -0.1)
    assert spec.functions == ("gsm8k", "my.pkg:fn")
    assert [(s.name, s.url, s.batch_samples) for s in spec.servers] == [("http", URL, 7)]


def test_parse_rewards_spells_a_function_in_one_way():
    found = parse_rewards("./a b.py::f, my.pkg : g").names
    assert found == ("./a b.py:f", "my.pkg:g")
    with pytest.raises(UsageError, match="has a:f twice"):
        parse_rewards("a:f,a::f")


def test_parse_rewards_gives_every_reward_the_weight_1():
    assert parse_rewards("gsm8k,exact_match").weights == (1.0, 1.0)


@pytest.mark.parametrize(
    ("url", "route"),
    [
        ("http://host:8000", "http://host:8000/pooling"),
        ("http://host:8000/", "http://host:8000/pooling"),
        ("https://host/models/", "https://host/models/pooling"),
        ("http://host:8000/pooling", "http://host:8000/pooling"),
        ("http://[::1]:8000", "http://[::1]:8000/pooling"),
    ],
)
def test_pooling_asks_one_sample_a_request_at_the_servers_route(url, route):
    (server,) = parse_rewards("pooling", pooling_url=url, http_batch=32).servers
    assert (server.name, server.url, server.batch_samples) == ("pooling", route, 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("",), "--rl-reward '' has an empty name; give names with one comma between two"),
        (("gsm8k,,arithmetic",), "--rl-reward 'gsm8k,,arithmetic' has an empty name"),
        (("gsm8k,",), "has an empty name"),
        (("gsm8k,arithmetic,gsm8k",), "has gsm8k twice; name it once and give it the sum"),
        (
            ("gsm8k,arithmetic", "1"),
            "--rl-reward-weights 1 has 1 weight(s), but --rl-reward gsm8k,arithmetic names 2; "
            "give one weight for each reward, in the same order",
        ),
        (("gsm8k", "1,2"), "has 2 weight(s), but --rl-reward gsm8k names 1"),
        (("gsm8k,arithmetic", "1,nan"), "has 'nan', which is not a finite number"),
        (("gsm8k,arithmetic", "1,-inf"), "has '-inf', which is not a finite number"),
        (("gsm8k,arithmetic", "1,one"), "has 'one', which is not a finite number"),
        (("gsm8k", ""), "has '', which is not a finite number; give numbers with commas"),
        (
            ("gsm8k,arithmetic", "0,-0.0"),
            "--rl-reward-weights 0,-0.0 makes every reward 0; give at least one weight other",
        ),
    ],
)
def test_parse_rewards_refuses_names_and_weights(flags, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_rewards(*flags)


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ("gsm8k,http", {}, "--rl-reward gsm8k,http names http, but --rl-reward-url is missing"),
        ("pooling", {}, "names pooling, but --rl-reward-pooling-url is missing"),
        ("gsm8k", {"url": URL}, "--rl-reward-url has no effect, because --rl-reward gsm8k does"),
        ("http", {"url": URL, "pooling_url": URL}, "--rl-reward-pooling-url has no effect"),
        ("gsm8k", {"header_env": "X"}, "--rl-reward-http-header-env has no effect"),
        ("gsm8k", {"pooling_header_env": "X"}, "--rl-reward-pooling-header-env has no effect"),
        (
            "http",
            {"url": "ftp://host/"},
            "--rl-reward-url ftp://host/ is not an http:// or https://",
        ),
        ("http", {"url": "file:///etc/passwd"}, "is not an http:// or https:// address"),
        ("http", {"url": "host:80/score"}, "is not an http:// or https:// address"),
        ("http", {"url": "http:///score"}, "is not an http:// or https:// address; give one with"),
        ("http", {"url": "http://host:no/"}, "is not an http:// or https:// address"),
        ("http", {"url": "http://host:99999/"}, "is not an http:// or https:// address"),
        ("http", {"url": "http://ho st/"}, "is not an http:// or https:// address"),
        ("http", {"url": "http://a..b/"}, "is not an http:// or https:// address"),
        ("http", {"url": f"http://{'a' * 64}/"}, "is not an http:// or https:// address"),
    ],
)
def test_parse_rewards_refuses_servers_and_limits(rewards, options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_rewards(rewards, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"url": "http://me:hush@host/score"},
        {"url": "http://hush@host:no/score"},
        {"url": "ftp://me:hush@host/"},
        {"url": "http://host/score?api_key=hush"},
        {"url": "host:80/score?hush"},
        {"url": "http://host/score#hush"},
        {"url": URL, "header_env": "Authorization: Bearer hush"},
    ],
)
def test_parse_rewards_tells_no_secret_that_is_on_the_command_line(options):
    with pytest.raises(UsageError, match="environment variable") as caught:
        parse_rewards("http", **options)
    assert "hush" not in str(caught.value)


def server_with_header(variable: str = "REWARD_HEADER"):
    return parse_rewards("http", url=URL, header_env=variable).servers[0]


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer hush:1=",
        "Authorization:Bearer hush:1=",
        " Authorization: Bearer hush:1= \n",
    ],
)
def test_header_of_reads_the_environment(monkeypatch, text):
    monkeypatch.setenv("REWARD_HEADER", text)
    assert header_of(server_with_header()) == {"Authorization": "Bearer hush:1="}


def test_header_of_is_empty_without_a_variable():
    assert header_of(parse_rewards("http", url=URL).servers[0]) == {}


@pytest.mark.parametrize(
    "text",
    [
        "hush",
        "",
        "hush:",
        ": hush",
        "X: hush\r\nY: 1",
        "X: hush\nY: 1",
        "X Y: hush",
        "X: h\u00fcsh",
    ],
)
def test_header_of_refuses_another_form_without_showing_it(monkeypatch, text):
    monkeypatch.setenv("REWARD_HEADER", text)
    with pytest.raises(UsageError, match="--rl-reward-http-header-env REWARD_HEADER") as caught:
        header_of(server_with_header())
    assert "hush" not in str(caught.value) and "sh\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_check_rewards_asks_for_variable_function_and_file(monkeypatch, tmp_path):
    monkeypatch.delenv("REWARD_HEADER", raising=False)
    with pytest.raises(UsageError, match="REWARD_HEADER names an environment variable that is not"):
        check_rewards(parse_rewards("http", url=URL, header_env="REWARD_HEADER"))
    with pytest.raises(UsageError, match=r"--rl-reward gms8k is not a built-in reward"):
        check_rewards(parse_rewards("exact_match,gms8k"))
    with pytest.raises(UsageError, match="--rl-import .*absent.py"):
        check_rewards(parse_rewards("exact_match", imports=[str(tmp_path / "absent.py")]))
    check_rewards(parse_rewards("exact_match,gsm8k"))


def test_what_an_environment_pays_is_a_part_that_comes_from_elsewhere():
    """No process and no server is asked for it, and the sum counts it."""
    spec = parse_rewards("environment,exact_match", "1,0.5")
    assert (spec.names, spec.functions) == (("environment", "exact_match"), ("exact_match",))
    empty = np.zeros(0, np.int32)
    rollout = Rollout(Prompt(0, "q", "7", empty), 0, "7", empty, empty, "stop", 0)
    with RewardStack(spec) as stack:
        assert stack.names == ("exact_match",)
        ticket = stack.begin(rollout)
        assert stack.wait(60) and stack.finished() == [(ticket, {"exact_match": Outcome(1.0)})]
        outcomes = {**stack.outcomes([rollout]), "environment": [Outcome(0.25)]}
        (scored,) = stack.weigh([rollout], outcomes)
        assert (scored.reward, scored.parts) == (0.75, {"environment": 0.25, "exact_match": 1.0})
        failed = {**outcomes, "environment": [Outcome(0.0, "timed out", "no answer")]}
        assert stack.weigh([rollout], failed)[0].failure == "environment: timed out: no answer"
    with pytest.raises(ValueError, match="'environment' is the reward of a server, a model or an"):
        reward("environment")


def test_an_environment_is_the_reward_where_no_other_is_named():
    assert RLConfig().reward == "exact_match" == RLConfig().as_dict()["reward"]
    alone = RLConfig.of(environment="calculator")
    assert reward_spec(alone).names == ("environment",)
    assert alone.as_dict()["reward"] == "environment"
    assert RLConfig.of(environment="calculator", reward="gsm8k").reward == "gsm8k"
    assert environment_spec(RLConfig()) is None
    given = RLConfig.of(
        environment="a:B",
        environment_timeout=2.0,
        environment_memory_gib=1.0,
        environment_env="A,B",
        max_environments=3,
        max_turns=4,
        max_turn_tokens=5,
        import_=("f.py",),
    )
    assert environment_spec(given) == EnvironmentSpec(
        name="a:B",
        timeout_seconds=2.0,
        memory_gib=1.0,
        imports=("f.py",),
        environment_names=("A", "B"),
        max_open=3,
        max_turns=4,
        max_turn_tokens=5,
    )
