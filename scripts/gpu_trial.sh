#!/usr/bin/env bash
# The first hour on a GPU, in stages of at most 8 minutes:
#
#     bash scripts/gpu_trial.sh                      # all stages, on what this machine has
#     bash scripts/gpu_trial.sh --list               # the stages, their limits and what they need
#     bash scripts/gpu_trial.sh --from train         # this stage and those after it
#     bash scripts/gpu_trial.sh --only doctor train  # these stages
#     bash scripts/gpu_trial.sh --parts DIR          # installs from parts: no registry is needed
#
# It starts scripts/gpu_trial/driver.py with any Python from 3.9 on; --help lists all options. The
# stages run in the existing environment (MCORE_RL_ENV, an active one, .venv, the python3 in PATH),
# or in the one that scripts/setup_env.sh makes.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

for python in python3 python "$root/.venv/bin/python" "${MCORE_RL_ENV:-}/bin/python"; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
    # exec, so that signals reach the driver and its exit code is this script's.
    exec "$python" "$root/scripts/gpu_trial/driver.py" "$@"
  fi
done
echo "gpu_trial: error: no Python from 3.9 on is in PATH; install one" >&2
exit 64
