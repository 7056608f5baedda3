# Runs the commands of setup_env.sh, explains their failures, and cleans up. Sourced by it; reads
# log, state, new and python. locked: this call holds the lock; explained: the failure was reported;
# beside: the process of setup_env.sh's arguments.

child= explained= locked= beside= status_beside=0
say() { echo "setup_env: $*"; }

fail() { # exit code, sentence
  explained=1
  say "$2" >&2
  exit "$1"
}

# Runs a command with its output in the log, in its own process group (set -m), and in the
# background, so that a signal to this script is handled at once and can end the complete group.
logged() {
  local status=0
  echo "+ $*" >>"$log"
  set -m
  "$@" >>"$log" 2>&1 </dev/null &
  child=$!
  set +m
  wait "$child" || status=$?
  child=
  return "$status"
}

last_log() { tac "$log" | sed '/^+ /q'; } # the last line first

# The requirement that pip or uv did not find, if that was the reason.
missing() {
  [[ $(last_log) =~ (distribution found for|you require)\ ([^[:space:],]+) ]] && echo "${BASH_REMATCH[2]%.}"
}

show_log() { tail -n 15 "$log" | sed 's/^/  | /' >&2; }

# Explains the last output of pip or uv. For pip, an index that does not answer has no packages, so a
# wheel is only reported as missing if no connection failed.
explain() { # what was to be installed, [the index that was asked after the configured ones]
  local said no_connection='connection broken|Failed to (establish|fetch|download)|timed out'
  no_connection+='|name resolution|error sending request|SSLError|nreachable|Unauthorized|Forbidden'
  said=$(last_log)
  show_log
  if [[ $said == *"No space left on device"* ]]; then
    fail 1 "the disk filled up while installing $1: make room and run this again."
  elif [[ $said =~ $no_connection && -n ${2:-} ]]; then
    fail 1 "$1 is not in the package index, and $2, where it can be had, cannot be reached: check \
the network and the proxy, give pip an index that has it (index-url or find-links), or accept its \
build for CUDA with MCORE_RL_ACCEPT_CUDA_TORCH=1."
  elif [[ $said =~ $no_connection ]]; then
    fail 1 "the package index cannot be reached to install $1: check the network, the proxy and \
pip's index-url, and run this again (log: $log)."
  elif missing >/dev/null; then
    fail 1 "no wheel of $(missing) for $("$python" -c 'import platform
print("Python", platform.python_version(), "on", platform.machine())') is in the package index\
${2:+ or in $2}: give pip an index that has it (index-url or find-links)."
  fi
  fail 1 "installing $1 failed; the last lines are above, all of them in $log."
}

clean_up() {
  local status=$?
  trap '' INT TERM HUP
  for process in ${child:+"-$child"} $beside; do
    kill -- "$process" 2>/dev/null || true
    wait "${process#-}" 2>/dev/null || true
  done
  # A compiler may still write for a moment.
  [[ -z $locked ]] || rm -rf "$new" "$state/tmp" 2>/dev/null || { sleep 1 && rm -rf "$new" "$state/tmp"; } || true
  if ((status > 128)); then
    say "interrupted; what was half made is removed." >&2
  elif ((status)) && [[ -z $explained ]]; then
    say "stopped unexpectedly with status $status; the log is $log." >&2
  fi
  exit "$status"
}
