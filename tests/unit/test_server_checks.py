"""What a server must be to serve a job: each refusal names the fault and the remedy."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings

from mcore_rl.common.errors import UsageError
from mcore_rl.common.vllm_version import installed_vllm
from mcore_rl.config import RLConfig
from mcore_rl.model.config_json import ModelShape, read_model_shape
from mcore_rl.trainer.server_checks import check_server, check_servers
from tests import hostile
from tests.model_shapes import CONFIGS
from tests.unit.fake_servers import FakeServer, fake_servers

ENDS = (2, 151645)  # of the job; the latter is that of CONFIGS' config.json


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FakeServer]]:
    with fake_servers(2) as found:
        yield found


@pytest.fixture
def server(servers: list[FakeServer]) -> FakeServer:
    installed = installed_vllm()
    assert installed is not None
    for each in servers:
        each.reset()
        each.vllm_version = installed[1].split("+")[0] + "+cpu"
        each.end_tokens = {*ENDS, 7}
    return servers[0]


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return read_model_shape(CONFIGS / "qwen3-30b-a3b.json")


def spec_of(shape: ModelShape, *servers: FakeServer, **values: Any) -> Any:
    """A job with prompts and responses of 128 tokens together."""
    options = {"max_prompt_tokens": 100, "max_response_tokens": 28, **values}
    urls = ",".join(each.url for each in servers)
    config = RLConfig.of(rollout_servers=urls, **options)
    checkpoint = SimpleNamespace(folder=Path("/checkpoint"))
    return SimpleNamespace(config=config, shape=shape, checkpoint=checkpoint, end_tokens=ENDS)


def test_server_that_fits_tells_how_many_requests_it_runs(server, servers, shape):
    assert check_server(server.url, spec_of(shape, server)) == 32
    server.configuration["parallel_config"]["data_parallel_size"] = 4
    assert check_server(server.url, spec_of(shape, server)) == 128
    assert check_servers(spec_of(shape, *servers)) == []


def test_configuration_has_the_names_that_vllm_gives_it(server):
    from vllm.config import VllmConfig

    known = {each.name: each for each in dataclasses.fields(VllmConfig)}
    assert server.configuration.keys() <= known.keys()
    for name in ("scheduler_config", "parallel_config", "model_config", "load_config"):
        fields = {each.name for each in dataclasses.fields(_class_of(name))}
        assert server.configuration[name].keys() <= fields


def _class_of(name: str) -> Any:
    from vllm import config

    return getattr(config, "".join(part.capitalize() for part in name.split("_")))


@pytest.mark.parametrize(
    ("section", "fields", "flags", "found", "remedy"),
    [
        ("weight_transfer_config", {"backend": "nccl"}, {}, "weights from mcore_rl", "mcore_rl"),
        ("weight_transfer_config", None, {}, "weights from mcore_rl", "--weight-transfer-config"),
        ("model_config", {"quantization": "fp8"}, {}, "quantised by fp8", "without quantisation"),
        ("model_config", {"max_model_len": 127}, {}, "takes 127 tokens", "--max-model-len 128"),
        ("model_config", {"max_model_len": None}, {}, "takes None tokens", "--max-model-len 128"),
        (
            "model_config",
            {"logprobs_mode": "raw_logprobs"},
            {},
            "returns raw_logprobs",
            "--logprobs-mode processed_logprobs",
        ),
        (
            "model_config",
            {},
            {"policy_loss": "policy_gradient", "score_centering": 20},
            "at most 20 log-probs",
            "--max-logprobs 21",
        ),
        (
            "model_config",
            {"multimodal_config": {"language_model_only": False}},
            {},
            "tower stays random",
            "--language-model-only, or without --load-format dummy",
        ),
        (
            "aux_output_config",
            {},
            {"routing_replay": "r3"},
            "the experts of each token",
            "--enable-return-routed-experts",
        ),
    ],
)
def test_unsuitable_option_is_refused_with_its_remedy(
    server, shape, section, fields, flags, found, remedy
):
    if fields is None:
        server.configuration[section] = None
    else:
        server.configuration[section] |= fields
    _refused(server, spec_of(shape, server, **flags), found, remedy)


def _refused(server: FakeServer, spec: Any, found: str, remedy: str) -> None:
    for check in (lambda: check_server(server.url, spec), lambda: check_servers(spec)):
        with pytest.raises(UsageError) as error:
            check()
        assert found in error.value.found and remedy in error.value.remedy
        assert error.value.flag == f"--rl-rollout-servers {server.url}"


def test_options_that_suffice_are_accepted(server, shape):
    server.configuration["model_config"] |= {"max_model_len": 4096, "max_logprobs": -1}
    server.configuration["aux_output_config"]["enable_return_routed_experts"] = True
    options = {"policy_loss": "policy_gradient", "score_centering": 30, "routing_replay": "r3"}
    spec = spec_of(shape, server, **options)
    assert check_server(server.url, spec) == 32


@pytest.mark.parametrize(
    ("load_format", "alone"), [("dummy", True), ("auto", False), ("safetensors", True)]
)
def test_multimodal_model_without_a_random_tower_is_accepted(server, shape, load_format, alone):
    server.configuration["load_config"] = {"load_format": load_format}
    server.configuration["model_config"]["multimodal_config"] = {"language_model_only": alone}
    assert check_server(server.url, spec_of(shape, server)) == 32


@pytest.mark.parametrize("section", ["model_config", "weight_transfer_config", "scheduler_config"])
def test_configuration_of_something_else_is_refused_or_ignored(server, shape, section):
    server.configuration[section] = ["a list"]
    if section == "scheduler_config":
        assert check_server(server.url, spec_of(shape, server)) > 1 << 20
    else:
        with pytest.raises(UsageError):
            check_server(server.url, spec_of(shape, server))


def test_another_vllm_is_refused(server, shape):
    server.vllm_version = "0.1.0"
    _refused(server, spec_of(shape, server), "runs vLLM 0.1.0", "the same version")


def test_all_servers_that_do_not_fit_are_named(servers, shape):
    spec = spec_of(shape, *servers)
    servers[0].vllm_version, servers[1].vllm_version = "0.1.0", "0.1.1"
    with pytest.raises(UsageError) as found:
        check_servers(spec)
    for each in servers[:2]:
        assert f"{each.url} runs vLLM {each.vllm_version}, and the job has" in str(found.value)
    assert str(found.value).count("the same version") == 1


@pytest.mark.parametrize("status", [200, 404, 500])
def test_server_without_the_route_for_token_ids_is_refused(server, shape, status):
    server.status_of_get = status
    _refused(server, spec_of(shape, server), "/inference/v1/generate", "--enable-scale-out")


def test_model_in_a_folder_on_this_machine_is_compared(server, shape, tmp_path):
    server.configuration["model_config"]["model"] = str(tmp_path)
    assert check_server(server.url, spec_of(shape, server)) == 32  # the folder is empty
    shutil.copy(CONFIGS / "qwen3-30b-a3b.json", tmp_path / "config.json")
    assert check_server(server.url, spec_of(shape, server)) == 32
    other = dataclasses.replace(shape, num_layers=shape.num_layers + 1)
    _refused(server, spec_of(other, server), "another model", "the checkpoint of the job")


def test_server_that_does_not_answer_is_named_and_others_are_checked(server, servers, shape):
    server.is_down = True
    (line,) = check_servers(spec_of(shape, *servers))
    assert line.startswith(f"{server.url} is not checked: ")
    with pytest.raises(RuntimeError):
        check_server(server.url, spec_of(shape, *servers))
    servers[1].vllm_version = "0.1.0"
    with pytest.raises(UsageError):
        check_servers(spec_of(shape, *servers))


def test_vllm_takes_every_request_of_a_check(server, shape):
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    check_server(server.url, spec_of(shape, server))
    assert len(server.bodies) == len(ENDS)
    for body in server.bodies:  # one that it refuses leaves a traceback in its log
        GenerateRequest.model_validate_json(json.dumps(body))


def test_server_that_ends_responses_elsewhere_is_refused(server, shape, tmp_path):
    server.end_tokens = {2}
    _refused(server, spec_of(shape, server), "at token 151645", "the checkpoint of the job")
    server.is_paused = True  # after a failed update; it samples nothing
    assert check_server(server.url, spec_of(shape, server)) == 32
    server.is_paused, server.end_tokens = False, {*ENDS, 7}
    model = server.configuration["model_config"]
    for name, folder in (("generation_config", tmp_path / "other"), ("model", tmp_path / "model")):
        folder.mkdir()
        shutil.copy(CONFIGS / "qwen3-30b-a3b.json", folder / "config.json")
        (folder / "generation_config.json").write_text('{"eos_token_id": [2, 151645]}')
        model[name] = str(folder)
        assert check_server(server.url, spec_of(shape, server)) == 32
        (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
        _refused(server, spec_of(shape, server), "at token 7", "the checkpoint of the job")
        model[name] = "auto"


@pytest.mark.parametrize("model", ["m" * 300, "a\0b", "/" + "m/" * 3000, 5, None, {"a": 1}])
def test_model_of_any_name_may_be_elsewhere(server, shape, model):
    server.configuration["model_config"]["model"] = model
    assert check_server(server.url, spec_of(shape, server)) == 32


def test_refusal_cuts_short_what_a_server_says(server, shape):
    server.configuration["model_config"]["logprobs_mode"] = "raw\n" * 5000
    with pytest.raises(UsageError) as error:
        check_server(server.url, spec_of(shape, server))
    assert len(error.value.found) < 600 and error.value.found.isprintable()


def test_any_configuration_is_accepted_refused_or_named(server, shape):
    spec, sound = spec_of(shape, server), server.configuration

    @settings(hostile.BOUNDED, max_examples=40)
    @given(hostile.changed(sound))
    def check(configuration: Any) -> None:
        server.configuration = configuration
        try:
            silent = check_servers(spec)
        except UsageError:
            return
        assert silent == [] or silent[0].startswith(f"{server.url} is not checked: ")

    check()
