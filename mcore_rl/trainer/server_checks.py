"""Checks of the servers of `--rl-rollout-servers`: before anything is built, and before each
connection, since a server may come late or return with other options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.http import quoted
from mcore_rl.common.readers import integer_within
from mcore_rl.common.vllm_version import installed_vllm
from mcore_rl.data.tokenizer import named_ends
from mcore_rl.hybrid_engine.remote.engine import BACKEND
from mcore_rl.hybrid_engine.remote.engine_client import HTTPEngineClient
from mcore_rl.hybrid_engine.remote.generate_client import num_log_probs
from mcore_rl.model.config_json import read_model_shape
from mcore_rl.moe.routing import R3
from mcore_rl.spec import JobSpec

_TIMEOUT_SECONDS = 60.0
_PROCESSED = "processed_logprobs"
_WITHOUT_LIMIT = 1 << 30  # requests at a time


def check_servers(spec: JobSpec) -> list[str]:
    """Check the servers that answer; return why others do not, which may still start.

    Raises what `check_server` raises for a server that does not fit, in one error for all.
    """
    silent: list[str] = []
    misfits: dict[str, UsageError] = {}
    for url in spec.config.rollout.servers:
        try:
            check_server(url, spec)
        except UsageError as error:
            misfits[url] = error
        except RuntimeError as error:
            silent.append(f"{url} is not checked: {error}")
    if len(misfits) > 1:
        raise UsageError(
            ": " + ", and ".join(f"{url} {each.found}" for url, each in misfits.items()),
            flag="--rl-rollout-servers",
            remedy=", or ".join(dict.fromkeys(each.remedy for each in misfits.values())),
        )
    for each in misfits.values():
        raise each
    return silent


def check_server(url: str, spec: JobSpec) -> int:
    """Check a server; return how many requests it runs at a time.

    Raises UsageError for a server without a route that the run calls, and for one with another
    model, another vLLM, other end tokens, quantised weights or unsuitable options. The model is
    compared if its folder is on this machine, too; otherwise the first update compares the tensors.
    Raises RuntimeError for a server that does not answer within a minute per call, and whatever
    else its answers cause.
    """
    env = spec.config.rollout.rollout_servers_header_env
    client = HTTPEngineClient(url, _TIMEOUT_SECONDS, header_env=env)
    try:
        return _checked(client, spec)
    except (UsageError, RuntimeError):
        raise
    except Exception as error:  # of any type: an answer may have anything at any place
        raise RuntimeError(f"an answer cannot be read ({type(error).__name__})") from error


def _checked(client: HTTPEngineClient, spec: JobSpec) -> int:
    """Return how many requests a server runs at a time. Raises UsageError."""
    version, configuration = client.vllm_version(), client.configuration()
    for found, remedy in (
        _of_version(version),
        _of_route(client),
        *_of_options(configuration, spec),
        _of_tower(configuration),
        _of_log_probs(configuration, spec),
        _of_model(configuration, spec),
    ):
        if found:
            raise _refusal(client, found, remedy)
    if found := _of_ends(client, configuration, spec):  # the route exists
        raise _refusal(client, found, "start it with the checkpoint of the job")
    return _capacity(configuration)


def _refusal(client: HTTPEngineClient, found: str, remedy: str) -> UsageError:
    flag = f"--rl-rollout-servers {client.base_url}"
    return UsageError(quoted(found.encode()), flag=flag, remedy=remedy)


def _capacity(configuration: Mapping[str, Any]) -> int:
    """Return a server's number of requests at a time, over its data-parallel engines."""
    counts = (
        _section(configuration, "scheduler_config").get("max_num_seqs"),
        _section(configuration, "parallel_config").get("data_parallel_size"),
    )
    per_engine, num_engines = (integer_within(each, 1, _WITHOUT_LIMIT) for each in counts)
    return (per_engine or _WITHOUT_LIMIT) * (num_engines or 1)


def _section(configuration: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a part of a configuration, which may have anything in its place."""
    section = configuration.get(name)
    return section if isinstance(section, dict) else {}


def _of_version(version: str) -> tuple[str, str]:
    installed = installed_vllm()
    if installed is None or _public(installed[1]) == _public(version):
        return "", ""
    return (
        f"runs vLLM {version}, and the job has {installed[1]}",
        "install the same version in both places",
    )


def _public(version: str) -> str:
    return version.split("+")[0]


def _of_route(client: HTTPEngineClient) -> tuple[str, str]:
    if client.generates_tokens():
        return "", ""
    return (
        "does not answer /inference/v1/generate",
        "start its vllm serve with --enable-scale-out",
    )


def _of_options(configuration: Mapping[str, Any], spec: JobSpec) -> list[tuple[str, str]]:
    """Return what is wrong with a server's options, and remedies; empty texts for what is right."""
    model = _section(configuration, "model_config")
    transfer = _section(configuration, "weight_transfer_config")
    config = spec.config
    least = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    length = model.get("max_model_len")
    problems = []
    if transfer.get("backend") != BACKEND:
        problems.append(
            (
                "does not receive weights from mcore_rl",
                f'start its vllm serve with --weight-transfer-config \'{{"backend": '
                f'"{BACKEND}"}}\'',
            )
        )
    if model.get("quantization") is not None:
        problems.append(
            (
                f"has weights quantised by {model['quantization']}, and receives unquantised ones",
                "start its vllm serve without quantisation",
            )
        )
    if not isinstance(length, int) or length < least:
        problems.append(
            (
                f"takes {length} tokens, and prompts and responses have up to {least}",
                f"start its vllm serve with --max-model-len {least}",
            )
        )
    if config.trainer.routing_replay == R3:
        outputs = _section(configuration, "aux_output_config")
        if not outputs.get("enable_return_routed_experts"):
            problems.append(
                (
                    "does not return the experts of each token, which --rl-routing-replay r3 needs",
                    "start its vllm serve with --enable-return-routed-experts (on GPUs), or give "
                    "--rl-routing-replay r2",
                )
            )
    return problems


def _of_tower(configuration: Mapping[str, Any]) -> tuple[str, str]:
    """Refuse a multimodal model of random weights, of which the job sends the text model alone."""
    multimodal = _section(_section(configuration, "model_config"), "multimodal_config")
    is_random = _section(configuration, "load_config").get("load_format") == "dummy"
    if not is_random or not multimodal or multimodal.get("language_model_only"):
        return "", ""
    return (
        "serves a multimodal model whose tower stays random, as the job sends the text model only",
        "start its vllm serve with --language-model-only, or without --load-format dummy",
    )


def _of_log_probs(configuration: Mapping[str, Any], spec: JobSpec) -> tuple[str, str]:
    model = _section(configuration, "model_config")
    mode, most = model.get("logprobs_mode"), model.get("max_logprobs")
    if mode != _PROCESSED:
        return (
            f"returns {mode}, which are not those of the sampled policy",
            f"start its vllm serve with --logprobs-mode {_PROCESSED}",
        )
    num_top = spec.config.recipe.score_centering
    least = num_log_probs(num_top, spec.shape.vocab_size)
    if not num_top or most == -1 or (isinstance(most, int) and most >= least):  # -1: no limit
        return "", ""
    return (
        f"returns at most {most} log-probs of each token, and --rl-score-centering {num_top} "
        f"needs {least}",
        f"start its vllm serve with --max-logprobs {least}",
    )


def _of_model(configuration: Mapping[str, Any], spec: JobSpec) -> tuple[str, str]:
    folder = _folder_with("config.json", configuration, "model")
    if folder is None:
        return "", ""
    if read_model_shape(folder, flag="--rl-rollout-servers") == spec.shape:
        return "", ""
    return (
        f"serves {folder}, another model than --rl-hf-checkpoint {spec.checkpoint.folder}",
        "start it with the checkpoint of the job",
    )


def _of_ends(client: HTTPEngineClient, configuration: Mapping[str, Any], spec: JobSpec) -> str:
    """Return how a server ends responses otherwise than the job, as far as it can be known: of ends
    that the job does not have, the files tell, if they are on this machine, too."""
    job = {token for token in spec.end_tokens if token < spec.shape.vocab_size}
    folder = _folder_with("generation_config.json", configuration, "generation_config")
    folder = folder or _folder_with("config.json", configuration, "model")
    others = set() if folder is None else {*named_ends(folder)} - job
    missing = [token for token in sorted(job) if client.ends_at(token) is False]
    if missing:
        return f"does not end a response at token {missing[0]}, as the job does"
    if others:
        return f"ends a response at token {min(others)}, and the job at {sorted(job)}"
    return ""


def _folder_with(file: str, configuration: Mapping[str, Any], name: str) -> Path | None:
    """Return a folder of a server's model with this file, if it is on this machine, too."""
    folder = str(_section(configuration, "model_config").get(name))
    return Path(folder) if os.path.isfile(os.path.join(folder, file)) else None
