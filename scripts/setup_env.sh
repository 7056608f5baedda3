#!/usr/bin/env bash
# Makes .venv, the environment of everything in this repository, with uv:
#
#     bash scripts/setup_env.sh [ARGUMENTS]
#
# With ARGUMENTS it then runs .venv's python with them, beside the last check of a new environment:
# that check imports for as long as some programs take, on one core.
#
# The first call builds it. Later calls compare its stamp and return at once, without network, if
# nothing changed; changed requirements or another stack cause a rebuild, a changed setup.py only a
# reinstallation of mcore_rl. The new environment is built in .venv.new and replaces .venv once it
# works: a failure or a signal leaves .venv unchanged, and downloads stay in uv's cache for the next
# call. uv comes from PATH or from pip; the indexes come from pip's configuration.
#
#   MCORE_RL_STACK=cpu|cuda   the stack, instead of the machine's default; cuda on a machine without
#                             a GPU is built in .venv-cuda, next to the .venv that works there
#   MCORE_RL_PYTHON=PATH      the interpreter, instead of the first suitable one in PATH
#   MCORE_RL_ACCEPT_CUDA_TORCH=1
#                             for the cpu stack, where no index has torch's build for CPU: its build
#                             for CUDA, which computes the same without a GPU and takes 3 GiB more
#
# Exit codes: 0 .venv is ready; 2 the chosen Python or stack cannot be used; 1 any other failure.
# Every failure ends in one sentence on stderr.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
parts=$root/scripts/setup_env state=$root/.cache/setup_env
log=$state/install.log tools=$state/tools
te_requirements=$root/scripts/requirements-te.txt
# Space for the download, the unpacked wheels and the cache: measured 4.5 GiB for the CPU stack
# with an empty cache; an estimate for CUDA.
declare -A min_free_gib=([cpu]=6 [cuda]=16)
[[ -z ${MCORE_RL_ACCEPT_CUDA_TORCH:-} ]] || min_free_gib[cpu]=16
. "$parts/running.sh"

has_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null || timeout 20 nvidia-smi -L >/dev/null 2>&1; }
digest() { sha256sum <"$1" | cut -d ' ' -f 1; }
version_of() { "$1" -c 'import sys; print(sys.version_info[:2])' 2>/dev/null; }

# Whether .venv is complete, and has the requested stack and, if one was requested, Python.
stack_is_current() {
  local version
  grep -qxF -- "$stack_key" "$stamp" 2>/dev/null && version=$(version_of "$venv/bin/python") &&
    [[ -z ${MCORE_RL_PYTHON:-} || $(version_of "$MCORE_RL_PYTHON") == "$version" ]]
}
all_is_current() { stack_is_current && grep -qxF -- "$package_key" "$stamp"; }

check() { logged "$1/bin/python" -I "$parts/check.py" "$requirements" "$stack" "$2"; }

# Installs mcore_rl into an environment, and stamps it once everything in it works.
finish() { # environment, uv
  logged "$2" pip install --no-progress --python "$1/bin/python" --no-deps --no-build-isolation \
    --reinstall-package mcore_rl -e "$root" || explain mcore_rl
  ((${#arguments[@]} == 0)) || { "$1/bin/python" "${arguments[@]}" & beside=$!; }
  check "$1" all || fail 1 "the environment was installed but does not work: $(tail -n 1 "$log") \
(log: $log)."
  [[ -z $beside ]] || wait "$beside" || status_beside=$?
  beside=
  printf '%s\n' "$stack_key" "$package_key" >"$1/mcore_rl_stamp"
}

build() {
  local started=$SECONDS aside=$previous free_mib
  explained=1 # find_python.sh reports its own failures
  python=$(bash "$parts/find_python.sh")
  explained=
  free_mib=$(df -Pk "$root" | awk 'NR == 2 { print int($4 / 1024) }')
  ((free_mib >= min_free_gib[$stack] * 1024)) || fail 1 "the disk of $root has $free_mib MiB free \
and the $stack stack needs ${min_free_gib[$stack]} GiB: make room and run this again."
  say "building $folder for the $stack stack with $python; the log is $log"
  . "$parts/install_stack.sh" # sets uv
  say "[4/4] mcore_rl, and a look whether all of it works"
  finish "$new" "$uv"
  trap '' INT TERM HUP # between the two renames .venv does not exist
  if [[ -e $venv || -L $venv ]]; then
    if [[ ! -e $stamp ]]; then # not made by this script, so not removed
      aside=$venv.aside.$(date +%Y%m%d%H%M%S)
      say "keeping the $folder that this script did not make as $(basename "$aside")"
    fi
    mv -T "$venv" "$aside"
  fi
  mv -T "$new" "$venv"
  rm -rf "$previous"
  say "the $stack stack is ready in $folder after $((SECONDS - started)) s"
}

arguments=("$@")
[[ $(uname -s) == Linux ]] || fail 2 "Linux is needed, and this is $(uname -s)."
for tool in awk cut df flock grep sed sha256sum tac tail; do
  command -v "$tool" >/dev/null || fail 1 "the program $tool is needed and not in PATH: install it."
done
stack=${MCORE_RL_STACK:-$(has_gpu && echo cuda || echo cpu)} folder=.venv
[[ $stack == c@(pu|uda) ]] || fail 2 "MCORE_RL_STACK is \"$stack\" and must be cpu or cuda."
[[ $stack == cpu ]] || has_gpu || folder=.venv-cuda
venv=$root/$folder requirements=$root/scripts/requirements-$stack.txt
new=$venv.new previous=$venv.previous stamp=$venv/mcore_rl_stamp
stack_key="stack=$stack requirements=$(digest "$requirements") root=$root"
[[ $stack == cpu ]] || stack_key+=" te=$(digest "$te_requirements")"
package_key="package=$(digest "$root/setup.py")"
# Variables that the caller set for another environment must not affect this one.
unset PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX VIRTUAL_ENV UV_SYSTEM_PYTHON
export PYTHONNOUSERSITE=1 PATH=${PATH//"$venv/bin:"/}
if_current() {
  all_is_current || return 0
  ((${#arguments[@]})) || exit 0
  exec "$venv/bin/python" "${arguments[@]}"
}
if_current

mkdir -p "$state" || fail 1 "$state cannot be written to: make the checkout writable."
trap clean_up EXIT
trap 'exit 129' HUP && trap 'exit 130' INT && trap 'exit 143' TERM
# Running children keep the lock even if this script is killed: they inherit the descriptor.
exec 9>"$state/lock"
if ! flock -n 9; then
  say "waiting for another setup of this checkout to end"
  until flock -w 1 9; do :; done
  if_current
fi
locked=1
# Clean up after an earlier call that was killed.
rm -rf "$new" "$state/tmp"
[[ -e $venv || ! -e $previous ]] || mv -T "$previous" "$venv"
mkdir -p "$state/tmp"
# Next to .venv, so that a single disk needs the space.
export TMPDIR=$state/tmp
: >"$log"
if stack_is_current || { [[ -d $venv && ! -e $stamp ]] && check "$venv" pins; }; then
  say "installing mcore_rl in $folder"
  finish "$venv" "$venv/bin/uv"
else
  build
fi
explained=1 # by the program that ran beside
exit "$status_beside"
