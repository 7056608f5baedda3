"""Parsing of the `--rl-reward*` flags, and the errors for values that cannot work."""

from __future__ import annotations

import re

import pytest

from mcore_rl.common.addresses import header_from
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.environments.options import EnvironmentOptions
from mcore_rl.rewards.functions import reward
from mcore_rl.rewards.pool import check_rewards
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rewards.worker import Outcome
from tests.reward_server import responses
from tests.reward_specs import rewards_of

URL = "http://127.0.0.1:9/score"


def test_parse_rewards_aligns_names_and_weights():
    spec = rewards_of(
        "gsm8k, my.pkg:fn,http", reward_weights="1,0.5, -0.1", reward_url=URL, reward_http_batch=7
    )
    assert spec.names == ("gsm8k", "my.pkg:fn", "http")
    assert spec.weights == (1.0, 0.5, -0.1)
    assert spec.functions == ("gsm8k", "my.pkg:fn")
    assert [(s.name, s.url, s.batch_samples) for s in spec.servers] == [("http", URL, 7)]


def test_parse_rewards_normalizes_spelling_and_gives_weight_1():
    spec = rewards_of("./a b.py::f, my.pkg : g")
    assert (spec.names, spec.weights) == (("./a b.py:f", "my.pkg:g"), (1.0, 1.0))


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
    (server,) = rewards_of("pooling", reward_pooling_url=url, reward_http_batch=32).servers
    assert (server.name, server.url, server.batch_samples) == ("pooling", route, 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("",), "--rl-reward '' has an empty name; "),
        (("gsm8k,,arithmetic",), "--rl-reward 'gsm8k,,arithmetic' has an empty name"),
        (("gsm8k,",), "has an empty name"),
        (("a:f,a::f",), "has a:f twice; name it once"),
        (("gsm8k,arithmetic,gsm8k",), "has gsm8k twice; name it once"),
        (("gsm8k,arithmetic", "1"), "--rl-reward-weights 1 has 1 weight(s), but --rl-reward gsm8k"),
        (("gsm8k", "1,2"), "has 2 weight(s), but --rl-reward gsm8k names 1"),
        (("gsm8k,arithmetic", "1,nan"), "has 'nan', which is not a finite number"),
        (("gsm8k,arithmetic", "1,-inf"), "has '-inf', which is not a finite number"),
        (("gsm8k,arithmetic", "1,one"), "has 'one', which is not a finite number"),
        (("gsm8k", ""), "has '', which is not a finite number; give numbers with commas"),
        (("gsm8k,arithmetic", "0,-0.0"), "--rl-reward-weights 0,-0.0 makes every reward 0; give"),
    ],
)
def test_parse_rewards_refuses_names_and_weights(flags, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        rewards_of(*flags[:1], reward_weights=flags[1] if flags[1:] else None)


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ("gsm8k,http", {}, "--rl-reward gsm8k,http names http, but --rl-reward-url is missing"),
        ("pooling", {}, "names pooling, but --rl-reward-pooling-url is missing"),
        (
            "gsm8k",
            {"reward_url": URL},
            "--rl-reward-url has no effect, because --rl-reward gsm8k does",
        ),
        (
            "http",
            {"reward_url": URL, "reward_pooling_url": URL},
            "--rl-reward-pooling-url has no effect",
        ),
        ("gsm8k", {"reward_http_header_env": "X"}, "--rl-reward-http-header-env has no effect"),
        (
            "gsm8k",
            {"reward_pooling_header_env": "X"},
            "--rl-reward-pooling-header-env has no effect",
        ),
        *(
            (
                "http",
                {"reward_url": url},
                f"--rl-reward-url {url} is not an http:// or https:// address",
            )
            for url in (
                *("ftp://host/", "file:///etc/passwd", "host:80/score", "http:///score"),
                *("http://host:no/", "http://host:99999/", "http://ho st/", "http://a..b/"),
                f"http://{'a' * 64}/",
            )
        ),
    ],
)
def test_parse_rewards_refuses_invalid_servers(rewards, options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        rewards_of(rewards, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"reward_url": "http://me:hush@host/score"},
        {"reward_url": "http://hush@host:no/score"},
        {"reward_url": "ftp://me:hush@host/"},
        {"reward_url": "http://host/score?api_key=hush"},
        {"reward_url": "host:80/score?hush"},
        {"reward_url": "http://host/score#hush"},
        {"reward_url": URL, "reward_http_header_env": "Authorization: Bearer hush"},
    ],
)
def test_parse_rewards_shows_no_secret_of_the_command_line(options):
    with pytest.raises(UsageError, match="environment variable") as caught:
        rewards_of("http", **options)
    assert "hush" not in str(caught.value)


FLAG = "--rl-reward-http-header-env"


@pytest.mark.parametrize("text", ["X: Bearer hush:1=", "X:Bearer hush:1=", " X: Bearer hush:1= \n"])
def test_header_from_reads_the_environment(monkeypatch, text):
    monkeypatch.setenv("REWARD_HEADER", text)
    assert header_from("REWARD_HEADER", FLAG) == {"X": "Bearer hush:1="}
    assert header_from(None, FLAG) == {}


MALFORMED = ["hush", "", "hush:", ": hush", "X: hush\r\nY: 1", "X: hush\nY: 1", "X Y: hush"]


@pytest.mark.parametrize("text", [*MALFORMED, "X: h\u00fcsh"])
def test_header_from_refuses_malformed_headers_without_showing_them(monkeypatch, text):
    monkeypatch.setenv("REWARD_HEADER", text)
    with pytest.raises(UsageError, match=f"{FLAG} REWARD_HEADER") as caught:
        header_from("REWARD_HEADER", FLAG)
    assert "hush" not in str(caught.value) and "sh\n" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        (
            "http",
            {"reward_url": URL, "reward_http_header_env": "REWARD_HEADER"},
            "REWARD_HEADER names an environment",
        ),
        ("exact_match,gms8k", {}, "--rl-reward gms8k is not a built-in reward"),
        ("exact_match", {"imports": ["/nowhere/absent.py"]}, "--rl-import .*absent.py"),
    ],
)
def test_check_rewards_needs_variable_function_and_file(monkeypatch, rewards, options, message):
    monkeypatch.delenv("REWARD_HEADER", raising=False)
    with pytest.raises(UsageError, match=message):
        check_rewards(rewards_of(rewards, **options))
    check_rewards(rewards_of("exact_match,gsm8k"))


def test_reward_of_an_environment_is_weighed_but_not_scored_by_the_stack():
    spec = rewards_of("environment,exact_match", reward_weights="1,0.5")
    assert (spec.names, spec.functions) == (("environment", "exact_match"), ("exact_match",))
    (rollout,) = responses("7")
    with RewardStack(spec) as stack:
        assert stack.names == ("exact_match",)
        ticket = stack.begin(rollout)
        assert stack.wait(60) and stack.finished() == [(ticket, {"exact_match": Outcome(1.0)})]
        outcomes = {**stack.outcomes([rollout]), "environment": [Outcome(0.25)]}
        (scored,) = stack.weigh([rollout], outcomes)
        assert (scored.reward, scored.parts) == (0.75, {"environment": 0.25, "exact_match": 1.0})
        failed = {**outcomes, "environment": [Outcome(0.0, "timed out", "no answer")]}
        assert stack.weigh([rollout], failed)[0].failure == "environment: timed out: no answer"
    with pytest.raises(ValueError, match="'environment' is the reward of "):
        reward("environment")


def test_environment_is_the_default_reward_where_one_is_named():
    assert RLConfig().reward == "exact_match" == RLConfig().as_dict()["reward"]
    alone = RLConfig.of(environment="calculator")
    assert alone.as_dict()["reward"] == "environment"
    assert RLConfig.of(environment="calculator", reward="gsm8k").reward == "gsm8k"
    assert EnvironmentOptions().spec((), None) is None
    given = EnvironmentOptions(
        environment="a:B",
        environment_timeout=2.0,
        environment_memory_gib=1.0,
        environment_env="A,B",
        max_environments=3,
        max_turns=4,
        max_turn_tokens=5,
    )
    assert given.spec(("f.py",), None) == EnvironmentSpec(
        name="a:B",
        timeout_seconds=2.0,
        memory_gib=1.0,
        imports=("f.py",),
        environment_names=("A", "B"),
        max_open=3,
        max_turns=4,
        max_turn_tokens=5,
    )
