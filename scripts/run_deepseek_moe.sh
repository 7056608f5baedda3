#!/usr/bin/env bash
# Trains a DeepSeek-architecture mixture of experts with GRPO: see usage() below, or --help.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'END'
Trains a DeepSeek-architecture mixture of experts with GRPO, on Megatron and vLLM, set-up included.

    bash scripts/run_deepseek_moe.sh [--preset NAME] [--nproc N] [--dry-run | --doctor] [flags]

  --preset NAME  tiny (default): minutes on 2 cores; makes a checkpoint and a task of its own
                 v2-lite: DeepSeek-V2-Lite on 8 GPUs        (planned, not run)
                 v3: DeepSeek-V3 on 32 machines of 8 GPUs   (planned, not run)
  --nproc N      processes on this machine (default: its GPUs; 4 without GPUs)
  --dry-run      print the commands for every machine, and train nothing; for the large presets
                 also the plan of memory and hand-over traffic (docs/using/planner.md)
  --doctor       check this machine and the job, and train nothing (docs/using/doctor.md)
  --help         this text

All other arguments go to mcore_rl.train: any Megatron flag and any --rl-* flag, including
--rl-config FILE. They override the preset, scripts/presets/NAME.yaml. With your own checkpoint,
prompts and reward:

    bash scripts/run_deepseek_moe.sh --rl-hf-checkpoint DIR --rl-prompts FILE --rl-reward gsm8k \
        --lr 1e-6 --rl-max-prompt-tokens 512 --rl-max-response-tokens 512

With either of the first two, the tiny preset's settings of its own task (reward, lengths, learning
rate: scripts/presets/tiny-task.yaml) do not apply. For a checkpoint of your own, --rl-layout auto
chooses the parallel sizes, unless some are given.

Several machines: call it on each one with NNODES, NODE_RANK, MASTER_ADDR (that of node 0) and, if
29500 is in use, MASTER_PORT; or once per machine under Slurm, which sets all of these:

    srun --ntasks-per-node=1 bash scripts/run_deepseek_moe.sh --preset v3 ...

Environment:
  MCORE_RL_CACHE         folder of the tiny checkpoint (default: ~/.cache/mcore_rl)
  MCORE_RL_SKIP_SETUP=1  use .venv unchanged, or without one the python in PATH: for environments
                         that scripts/setup_env.sh did not make

Exit codes: 0 trained; 2 a mistake in the arguments or in a file that they name, with one sentence
on stderr; 1 if --doctor finds a problem; 128 + number if ended by a signal; otherwise that of the
process that failed.
END
}

fail() {
  echo "mcore_rl: error: $1" >&2
  exit 2
}

# ------------------------------------------------------------------------------------ the arguments

preset=tiny
nproc=
dry_run=
doctor=
flags=()

while (($#)); do
  case $1 in
    --preset | --nproc)
      (($# > 1)) || fail "$1 is the last argument and needs a value; see --help"
      declare "${1#--}=$2"
      shift
      ;;
    --preset=* | --nproc=*) declare "${1#--}" ;;
    --dry-run) dry_run=1 ;;
    --doctor) doctor=1 ;;
    -h | --help)
      usage
      exit
      ;;
    *) flags+=("$1") ;;
  esac
  shift
done

case $preset in # the preset's number of machines, and of processes on each
  tiny) planned_nodes=1 planned_nproc=4 ;;
  v2-lite) planned_nodes=1 planned_nproc=8 ;;
  v3) planned_nodes=32 planned_nproc=8 ;;
  *) fail "--preset $preset is unknown; choose tiny, v2-lite or v3" ;;
esac
[[ ${nproc:-1} =~ ^[1-9][0-9]*$ ]] || fail "--nproc $nproc must be a number above 0"

# Prints a flag's values in the arguments, one per line, from both spellings.
values_of() {
  local i
  for ((i = 0; i < ${#flags[@]}; i++)); do
    case ${flags[i]} in
      "$1") echo "${flags[i + 1]:-}" ;;
      "$1="*) echo "${flags[i]#*=}" ;;
    esac
  done
}

mapfile -t config_files < <(values_of --rl-config)
for file in "${config_files[@]}"; do
  [[ -r $file && ! -d $file ]] || fail "--rl-config $file cannot be read; name a YAML file of flags"
done

# Whether the user's arguments or YAML files set a flag; YAML may have "-" or "_" between its words.
given() {
  local key=${1#--}
  [[ -z $(values_of "$1") ]] || return 0
  ((${#config_files[@]})) || return 1
  grep -qE "^[^#]*${key//-/[-_]}[\"']?[[:space:]]*:" -- "${config_files[@]}"
}

# Whether they set a part of the layout, or say how it is found.
given_layout() {
  local name
  for name in rl-layout rl-rollout-{tp,ep}-size rl-rollout-{ranks,servers} \
    {tensor,pipeline,expert}-model-parallel-size context-parallel-size \
    expert-tensor-parallel-size; do
    ! given "--$name" || return 0
  done
  return 1
}

# ------------------------------------------------------------------------------------- the machines

count_gpus() {
  local found
  [[ ${MCORE_RL_STACK:-} != cpu ]] || { echo 0 && return; }
  found=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') ||
    found=$(compgen -G '/dev/nvidia[0-9]*' | wc -l) || true
  if ((found)) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    local IFS=, visible
    read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
    found=${#visible[@]}
  fi
  echo "$found"
}

gpus=$(count_gpus)
if [[ -z $nproc ]]; then
  nproc=$((gpus ? gpus : planned_nproc))
fi
if ((gpus == 0)) && [[ $preset != tiny && -z $dry_run ]]; then
  fail "--preset $preset needs GPUs and this machine has none; try --preset tiny or --dry-run"
fi

nodes=${NNODES:-}
node_rank=${NODE_RANK:-}
master_addr=${MASTER_ADDR:-}
master_port=${MASTER_PORT:-29500}
if [[ -z $nodes ]] && ((${SLURM_NNODES:-1} > 1)); then
  ((${SLURM_LOCALID:-0} == 0)) ||
    fail "Slurm started several tasks on a machine; one starts all its processes: \
srun --ntasks-per-node=1"
  nodes=$SLURM_NNODES
  node_rank=${node_rank:-${SLURM_NODEID:-}}
  if [[ -z $master_addr ]] && command -v scontrol >/dev/null; then
    master_addr=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" | sed -n 1p) || master_addr=
  fi
  # Jobs that share a machine must not share a port.
  master_port=${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-9500} % 10000))}
fi
if [[ -z $nodes ]]; then
  ((planned_nodes == 1)) || [[ -n $dry_run ]] ||
    fail "--preset $preset is laid out for $planned_nodes machines of $planned_nproc GPUs; set \
NNODES, NODE_RANK and MASTER_ADDR on each, or start it with srun"
  nodes=$planned_nodes
fi
[[ $nodes =~ ^[1-9][0-9]*$ ]] || fail "NNODES=$nodes must be a number above 0"
if ((nodes > 1)) && [[ -z $dry_run ]]; then
  [[ $node_rank =~ ^[0-9]+$ ]] && ((node_rank < nodes)) ||
    fail "NODE_RANK=$node_rank must be this machine's number, 0 to $((nodes - 1)), with NNODES=$nodes"
  [[ -n $master_addr ]] ||
    fail "MASTER_ADDR is not set; with NNODES=$nodes it must be the address of node 0"
fi

# -------------------------------------------------------------------------------------- the command

python=$root/.venv/bin/python
if [[ -n ${MCORE_RL_SKIP_SETUP:-} && ! -x $python ]]; then
  python=$(command -v python3) || fail "MCORE_RL_SKIP_SETUP is set and there is no python3 in PATH"
fi

environment=()
default_env() { # name=value, unless the caller has set it
  [[ -n ${!1+set} ]] || environment+=("$1=$2")
}

if ((gpus == 0)) && [[ $preset == tiny ]]; then
  # Several processes share the cores, and compiling C++ for them would take minutes.
  default_env OMP_NUM_THREADS 1
  default_env TORCHDYNAMO_DISABLE 1
  # vLLM's CPU kernels warn about the memory binding in each process.
  default_env TORCH_CPP_LOG_LEVEL ERROR
fi
default_env TOKENIZERS_PARALLELISM false

own=() # flags that the preset does not set
configs=(--rl-config "$root/scripts/presets/$preset.yaml")
if [[ $preset == tiny ]]; then
  if ! given --rl-hf-checkpoint; then
    configs+=(--rl-config "$root/scripts/presets/tiny-model.yaml")
  elif ! given_layout; then
    own+=(--rl-layout auto)
  fi
  if given --rl-hf-checkpoint || given --rl-prompts; then
    echo "# own checkpoint or prompts: reward, lengths and learning rate are those of the command" \
      "line, or the defaults of mcore_rl.train, and not those of the tiny task"
  else
    configs+=(--rl-config "$root/scripts/presets/tiny-task.yaml")
  fi
fi
make_checkpoint=() # arguments of python
if given --rl-hf-checkpoint; then
  folder=$(values_of --rl-hf-checkpoint | tail -n 1)
  [[ ! -d $folder ]] || default_env HF_HUB_OFFLINE 1
elif [[ $preset == tiny ]]; then
  tiny=${MCORE_RL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/mcore_rl}/tiny_deepseek_v3
  make_checkpoint=("$root/scripts/make_tiny_deepseek.py" --out "$tiny" --warm-up)
  default_env HF_HUB_OFFLINE 1
  own+=(--rl-hf-checkpoint "$tiny")
  # Held-out prompts of another task would measure nothing.
  if ! given --rl-prompts; then
    own+=(--rl-prompts "$tiny/prompts/train.jsonl")
    given --rl-eval-prompts || own+=(--rl-eval-prompts "$tiny/prompts/heldout.jsonl")
  fi
elif [[ -n $dry_run ]]; then
  own+=(--rl-hf-checkpoint CHECKPOINT)
else
  fail "--preset $preset needs --rl-hf-checkpoint, the folder of the checkpoint to train"
fi
if [[ $preset != tiny ]] && ! given --rl-prompts; then
  [[ -n $dry_run ]] ||
    fail "--preset $preset needs --rl-prompts, a JSONL or Parquet file of prompts"
  own+=(--rl-prompts PROMPTS)
fi
if ! given --rl-run-dir && ! given --rl-run-name; then
  # With milliseconds: two runs that start together write to different folders.
  own+=(--rl-run-dir "runs/$preset-$(date +%Y%m%d-%H%M%S.%3N)")
fi

prepare=(bash "$root/scripts/setup_env.sh" "${make_checkpoint[@]}")
if [[ -n ${MCORE_RL_SKIP_SETUP:-} ]]; then
  prepare=()
  ((${#make_checkpoint[@]} == 0)) || prepare=("$python" "${make_checkpoint[@]}")
fi

launch() { # node rank; sets command. A single machine finds a free port by itself.
  command=("$python" -m mcore_rl.launch --nproc-per-node "$nproc")
  if ((nodes > 1)); then
    command+=(--nnodes "$nodes" --node-rank "$1"
      --master-addr "${master_addr:-MASTER_ADDR}" --master-port "$master_port")
  fi
  command+=(-m mcore_rl.train "${configs[@]}" "${own[@]}" "${flags[@]}")
}

if [[ -n $dry_run ]]; then
  show() { printf '%q' "$1" && printf ' %q' "${@:2}" && echo; }
  echo "# preset $preset, machines: $nodes, processes on each: $nproc"
  if [[ $preset != tiny ]]; then
    # The checkpoint's config.json if it exists, else the published one.
    config=${folder:-}/config.json
    [[ -f $config ]] || config=$root/scripts/presets/$preset.json
    plan=("$python" -m mcore_rl.cli plan --hf-config "$config" --world-size "$((nodes * nproc))"
      --rl-ranks-per-node "$nproc" "${configs[@]}" "${flags[@]}")
    echo "# the plan"
    show "${plan[@]}"
    if [[ -x $python ]]; then
      "${plan[@]}"
    else
      echo "# (there is no .venv to make it with yet; scripts/setup_env.sh makes one)"
    fi
  fi
  ((${#prepare[@]} == 0)) || show env "${environment[@]}" "${prepare[@]}"
  for ((node = 0; node < nodes; node++)); do
    echo "# machine $node"
    launch "$node"
    show env "${environment[@]}" "${command[@]}"
  done
  exit
fi

# ------------------------------------------------------------------------------------------ running

# Runs a command in the background, because bash defers signals during a foreground command.
step() {
  "$@" &
  child=$!
  trap 'end_step 130' INT
  trap 'end_step 143' TERM
  trap 'end_step 129' HUP
  local status=0
  wait "$child" || status=$?
  trap - INT TERM HUP
  ((status == 0)) || exit "$status"
}

end_step() {
  trap '' INT TERM HUP
  kill -TERM "$child" 2>/dev/null || true
  wait "$child" || true
  exit "$1"
}

((${#environment[@]} == 0)) || export "${environment[@]}"
((${#prepare[@]} == 0)) || step "${prepare[@]}"
if [[ -n $doctor ]]; then
  ((nodes == 1)) || export MASTER_ADDR=$master_addr MASTER_PORT=$master_port
  exec "$python" -m mcore_rl.cli doctor --world-size "$((nodes * nproc))" -- \
    --rl-ranks-per-node "$nproc" "${configs[@]}" "${own[@]}" "${flags[@]}"
fi
launch "${node_rank:-0}"
echo "# starting $nproc processes, which import Megatron first and say what they do from then on"
# exec, so that signals reach the launcher and its exit code is this script's.
exec "${command[@]}"
