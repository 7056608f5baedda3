#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'EOF'
bash scripts/run_tests.sh               the quick checks: ruff, mypy, the unit tests that are not slow,
                                        one hand-over from Megatron to vLLM bit for bit, and one short
                                        run by the launcher; 4 minutes on 2 cores
bash scripts/run_tests.sh --touched     the quick checks, the slow files that the change touches, and
                                        a quarter of the others in turn (tests/tiers.py); chosen for
                                        40 minutes on 2 cores
bash scripts/run_tests.sh --all         ruff, mypy and all tests, at their full length; for
                                        every night, over an hour and a half on 2 cores
bash scripts/run_tests.sh ARGUMENTS     ruff, mypy and what pytest runs with these arguments

A failed check does not stop the next one. The last lines say how long each check took; if any check
failed, the last one names it and the exit code is 1.
EOF
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  usage
  exit
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
took=()
# Imports are most of these tests. Debian's Python needs a fifth less time for them than one that is
# compiled with Python's defaults.
debian=/usr/bin/python3.11
if [[ -n ${CI:-} && -z ${MCORE_RL_PYTHON:-} ]] && $debian -c "import ensurepip, venv" 2>/dev/null; then
  export MCORE_RL_PYTHON=$debian
fi
bash scripts/setup_env.sh
took+=("setup $SECONDS s")
export PATH=$PWD/.venv/bin:$PATH

# One thread per process (tests start up to eight on two cores), no C++ compilation for minutes, no
# network access, and the variables that Megatron and vLLM need.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1
export CUDA_DEVICE_MAX_CONNECTIONS=1
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind

# Three files at once: most keep one core busy or wait for ranks, and some wait for clocks.
# In the order of collection, which tests/conftest.py arranges.
workers=(--numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 20)
failed=()

check() { # name, command
  echo "== $1"
  local began=$SECONDS
  "${@:2}" || failed+=("$1")
  took+=("$1 $((SECONDS - began)) s")
}

# On the core that downloads, and tests that wait, leave idle; reported at the end.
types=$(mktemp)
mypy >"$types" 2>&1 &
types_pid=$!
trap 'kill "$types_pid" 2>/dev/null || true; rm -f "$types"' EXIT
finish_mypy() {
  local code=0
  wait "$types_pid" || code=$?
  cat "$types"
  return "$code"
}

# For the sandbox's best level, whose tests fail without it in CI.
if [[ -n ${CI:-} && $EUID == 0 ]] && ! command -v bwrap >/dev/null; then
  apt-get update && apt-get install --yes --no-install-recommends bubblewrap || echo "no bubblewrap"
fi

check "ruff check" ruff check .
check "ruff format" ruff format --check .
if [[ $# == 1 && $1 == @(--all|--touched) ]]; then
  # One test opens a report in a browser, and fails without one in CI.
  if [[ -n ${CI:-} && $EUID == 0 ]] &&
    ! command -v chromium chromium-browser google-chrome >/dev/null; then
    apt-get update && apt-get install --yes --no-install-recommends chromium || echo "no browser"
  fi
  tier=(--tier touched)
  if [[ $1 == --all ]]; then
    tier=()
    # Runs until they have learned, and each stage of the GPU trial.
    export MCORE_RL_LONG_TESTS=1 MCORE_RL_WHOLE_TRIAL=1
  fi
  # Downloads hundreds of megabytes the first time, so not within a test's time limit.
  if [[ $1 == --all ]] || python -m tests.tiers | grep "^tests/cuda/" >/dev/null; then
    check "the CUDA packages of tests/cuda" python -m tests.cuda.stack
  fi
  check "pytest" python -m pytest "${workers[@]}" "${tier[@]}"
elif (($#)); then
  check "pytest" python -m pytest "$@"
else
  # Collecting the other folders imports their modules, in each worker.
  quick=(tests/unit tests/dist/test_sharding_manager.py tests/e2e/test_fork.py)
  check "pytest, the quick tests" python -m pytest "${workers[@]}" -m quick "${quick[@]}"
fi
check "mypy" finish_mypy
[[ ${1:-} != @(--all|--touched) ]] || python scripts/count_lines.py

printf -v list ', %s' "${took[@]}"
echo "== ${list:2}"
if ((${#failed[@]})); then
  printf -v list ', %s' "${failed[@]}"
  echo "== failed: ${list:2}"
  exit 1
fi
echo "== ruff check, ruff format, mypy and pytest passed"
