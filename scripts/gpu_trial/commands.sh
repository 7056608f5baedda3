# Functions of the stages' commands; the driver runs them with bash.
#
# Its variables: OUT, WORK, HAS_CUDA (0 or 1), NUM_GPUS; MODEL, PROMPTS and PARTS (--model, --prompts
# and --parts, or empty).
set -euo pipefail
failed=0 EAGER='' PARTS=${PARTS:-}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false} PYTHONUNBUFFERED=1
# Parts lack FlashInfer, which vLLM's sampler imports, and DeepGEMM's compiled module.
[[ -z $PARTS ]] || export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0
if ((HAS_CUDA)); then
  EAGER=--rl-rollout-enforce-eager
else # processes share the cores, and compiling C++ for them takes minutes
  export TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1}
  export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} MCORE_RL_GPU_TESTS=cpu
fi

# The existing environment: BASE is its Python, which finds torch and (unless parts bring it)
# megatron.core, or empty. ABOVE is the environment on top of it, if something had to be installed.
find_base() {
  local wanted='f("torch") and f("megatron.core")'
  [[ -z $PARTS ]] || wanted='f("torch")'
  local candidates=("${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}" "$PWD/.venv") path
  candidates=("${candidates[@]/%//bin/python}" "$(command -v python3)")
  [[ -z ${MCORE_RL_ENV:-} ]] || candidates=("$MCORE_RL_ENV/bin/python" "$MCORE_RL_ENV")
  for path in "${candidates[@]}"; do
    if [[ -f $path ]] && (cd / && "$path" -c "from importlib.util import find_spec as f; import sys
sys.exit(not ($wanted))") 2>/dev/null; then
      BASE=$path
      ABOVE=$PWD/.cache/gpu_trial/$(echo -n "$BASE" | sha256sum | head -c 12)
      PATH=$(dirname "$BASE"):$PATH
      [[ ! -x $ABOVE/bin/python ]] || PATH=$ABOVE/bin:$PATH
      unset PYTHONHOME
      return
    fi
  done
}
BASE='' ABOVE=''
find_base

run() { echo "+ $*" && "$@"; } # the page names the last one if the stage does not end
tool() { python scripts/gpu_trial/tools.py "$@"; }
launch() { # processes, module; with SHARED=1 beside other programs on the GPU
  local share=()
  if ((HAS_CUDA && ($1 > NUM_GPUS || ${SHARED:-0}))); then
    share=(--rl-import "$PWD/scripts/gpu_trial/shared_gpu.py")
  fi
  if ((HAS_CUDA && $1 > NUM_GPUS)); then
    share_gpu "$@" "${share[@]}"
  else
    run python -m mcore_rl.launch --standalone --nproc-per-node "$1" -m "${@:2}" "${share[@]}"
  fi
}
# Each process as a machine of its own, with the only GPU: NCCL refuses two ranks of one host on one
# device, and takes NCCL_HOSTID for the host. It then sends by sockets.
share_gpu() {
  local port node pid pids=() status=0
  port=$(free_port)
  echo "+ python -m mcore_rl.launch --nnodes $1 -m ${*:2}"
  for ((node = 0; node < $1; node++)); do
    "${MACHINE[@]}" NCCL_HOSTID="rank-$node" python -m mcore_rl.launch --nnodes "$1" \
      --nproc-per-node 1 --node-rank $node --master-addr 127.0.0.1 --master-port "$port" \
      -m "${@:2}" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return $status
}
MACHINE=(env NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 GLOO_SOCKET_IFNAME=lo
  VLLM_HOST_IP=127.0.0.1 VLLM_ALLREDUCE_USE_SYMM_MEM=0)
free_port() { python -c "import socket as s; p = s.create_server(('', 0)); print(p.getsockname()[1])"; }
fresh() { mktemp -d "$WORK/$1.XXXXXX"; }

# Checkpoints: the path of one with random weights, made once.
made() { # folder, the command that makes it and leaves nothing if it fails
  [[ -d $1 ]] || "${@:2}" >&2 || return
  echo "$1"
}
tiny() { # [architecture]
  local folder=$WORK/tiny_${1:-deepseek_v3}
  made "$folder" python scripts/make_tiny_deepseek.py --out "$folder" \
    --arch "${1:-deepseek_v3}" --no-warm-up
}
ending() { tool ending "$(tiny)" "$WORK/ending" && echo "$WORK/ending"; } # with early EOS
sized() { made "$WORK/$1" tool sized "$1" "$WORK/$1"; } # dense or moe; takes a while to move

task() { # checkpoint; sets TASK, the flags of a job with short prompts and responses
  local prompts=$1/prompts/train.jsonl length=24
  if [[ $1 == "$MODEL" ]]; then
    prompts=${PROMPTS:-$(tiny)/prompts/train.jsonl} length=256
  fi
  TASK=(--rl-hf-checkpoint "$1" --rl-prompts "$prompts" --rl-max-prompt-tokens $length
    --rl-max-response-tokens 8)
  ((HAS_CUDA)) || TASK+=(--rl-rollout-kv-cache-gib 0.25)
}

verify() { # name, checkpoint, processes, flags; a failure does not stop the next one
  local found=$WORK/verified.json
  rm -f "$found"
  task "$2"
  launch "$3" mcore_rl.verify "${TASK[@]}" "${@:4}" --rl-verify-out "$found" || failed=1
  tool verified "$1" "$found" || failed=1
}

train() { # name, checkpoint, processes, flags; sets RUN, the run directory
  RUN=$(fresh run)/run
  task "$2"
  echo "train, $1"
  launch "$3" mcore_rl.train "${TASK[@]}" --rl-reward scripts.varied_reward:score \
    --rl-reward-workers 1 --rl-num-prompts-per-step 8 --rl-num-samples-per-prompt 4 \
    --rl-eval-interval 0 --lr 1e-4 --rl-run-dir "$RUN" "${@:4}"
}

learn() { # algorithm, file of rows; without engines
  RUN=$(fresh run)/run
  echo "learn, $1"
  launch 1 mcore_rl.train --rl-algorithm "$1" --rl-hf-checkpoint "$(tiny)" --rl-prompts "$2" \
    --rl-max-prompt-tokens 24 --rl-max-response-tokens 8 --rl-num-prompts-per-step 8 \
    --rl-num-steps 2 --lr 1e-4 --rl-run-dir "$RUN"
}

switch() { # name, checkpoint, processes, flags
  MCORE_RL_SWITCH_PARTS=$(fresh parts)
  export MCORE_RL_SWITCH_PARTS
  train "switch of $1" "${@:2}" --rl-num-steps 5 --save-interval 1000 --rl-canary-interval 0 \
    --rl-num-prompts-per-step 2 --rl-num-samples-per-prompt 2 \
    --rl-import "$PWD/benchmarks/switch_parts.py" $EAGER
  echo "switch of $1: $(python benchmarks/switch_parts.py "$MCORE_RL_SWITCH_PARTS")"
}

serve() { # name, port, flags; a `vllm serve` that receives weights, in the background
  local checkpoint
  checkpoint=$(tiny)
  "${MACHINE[@]}" NCCL_HOSTID="$1" VLLM_SERVER_DEV_MODE=1 \
    python -m vllm.entrypoints.cli.main serve "$checkpoint" --host 127.0.0.1 --enable-scale-out \
    --load-format dummy --dtype bfloat16 --max-model-len 128 --max-num-seqs 32 \
    --logprobs-mode processed_logprobs --kv-cache-memory-bytes 1073741824 \
    --gpu-memory-utilization 0.1 --weight-transfer-config '{"backend": "mcore_rl"}' \
    "${@:2}" >"$OUT/$1.log" 2>&1 &
}
serving() { # port, process
  until python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$1/health')" 2>/dev/null
  do sleep 1 && kill -0 "$2"; done
}
kill_after() { # step, process; once a run that begins after this call has recorded the step
  local before run
  before=" $(echo "$WORK"/run.*) "
  while sleep 0.2; do
    for run in "$WORK"/run.*; do
      if [[ $before != *" $run "* ]] && grep -qs "\"step\": $1\b" "$run/run/metrics.jsonl"; then
        pkill -9 -P "$2" || true
        kill -9 "$2"
        return
      fi
    done
  done
}

doctor() {
  task "$(tiny)"
  run python -m mcore_rl.cli doctor --world-size 1 -- "${TASK[@]}"
}

gpu_tests() { run python -m pytest -v -p no:cacheprovider "$@"; }

resume() {
  local folder
  folder=$(fresh resume)
  # This seed draws SIGKILL in the update of step 2.
  run python scripts/kill_test.py --kills 1 --seed 609 --processes 1 --steps 4 \
    --folder "$folder" --flags="$EAGER"
  tool metrics "$folder/undisturbed" "$folder/run0"
}

step_time() {
  local checkpoint
  checkpoint=$(tiny)
  run python scripts/gpu_trial/step_time.py "$checkpoint" "$WORK" "$MODEL" "$PROMPTS"
}

environment() {
  if [[ -z $BASE && -n ${MCORE_RL_ENV:-}$PARTS ]]; then
    echo "${MCORE_RL_ENV:+MCORE_RL_ENV=$MCORE_RL_ENV has }no Python that finds torch" \
      "${PARTS:-and megatron.core}"
    exit 1
  elif [[ -z $BASE ]]; then
    # Without the mark and in a session of its own, so that the limit of the stage does not end it.
    env -u MCORE_RL_GPU_TRIAL setsid bash scripts/setup_env.sh >"$OUT/setup_env.log" 2>&1 &
    echo "scripts/setup_env.sh installs, beyond this stage's limit as well (process $!," \
      "setup_env.log); start the trial again, which waits for it"
    wait $! || { tail -n 5 "$OUT/setup_env.log" && exit 1; }
    find_base
  fi
  echo "environment: $BASE"
  if [[ -n $PARTS ]]; then
    [[ -x $ABOVE/bin/python ]] || make_above
    run python scripts/gpu_trial/parts.py "$PARTS" "$ABOVE"
    has_mcore_rl || run python -m pip --no-input install --no-index --no-deps \
      --no-build-isolation -e .
  else
    has_mcore_rl || lay_over
  fi
  python -m pip list --format freeze 2>/dev/null
  python --version
  nproc
  free -g
  ! command -v nvidia-smi >/dev/null || { nvidia-smi && { nvidia-smi topo -m || true; }; }
}

has_mcore_rl() {
  local place='import mcore_rl.patches as p; print(p.__path__[0])'
  [[ $(python -c "$place" 2>/dev/null) == "$PWD/patches" ]]
}

make_above() { # a virtual environment with all packages of BASE
  rm -rf "$ABOVE"
  "$BASE" -m venv --without-pip "$ABOVE"
  PATH=$ABOVE/bin:$PATH
  "$BASE" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
    >"$(echo "$ABOVE"/lib/python3.*/site-packages)/below.pth"
}

lay_over() { # mcore_rl, from registries
  make_above
  local install=("$ABOVE/bin/python" -m pip --no-input install)
  local wanted=(-e . pytest pytest-timeout hypothesis)
  # The second try is with build isolation, for which pip fetches the build tools.
  run "${install[@]}" --no-build-isolation "${wanted[@]}" || run "${install[@]}" "${wanted[@]}" ||
    { rm -rf "$ABOVE" && exit 1; }
}
