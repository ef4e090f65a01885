# What both scripts beside this file use. Each step prints a line. A failed step shows its output and
# ends the script.

# Never call these functions as a condition (`if`, `until`, `!`, before `||` or `&&`): bash ignores
# `set -e` there, and only the last command of a function decides.

attempt() { # <command> …: sets $said and $status; each command of a function counts
  set +e
  said=$(set -e; "$@" </dev/null 2>&1)
  status=$?
  set -e
}

step() { # <what is done> <command> …
  local said status
  printf '%s … ' "$1"
  shift
  attempt "$@"
  if ((status == 0)); then echo ok; else echo failed; printf '%s\n' "$said"; exit 1; fi
}

wait_for() { # <seconds> <command> …: until the command succeeds; its last output is shown
  local deadline=$((SECONDS + $1)) said status
  shift
  while true; do
    attempt "$@"
    if ((status == 0)); then break; fi
    if ((SECONDS >= deadline)); then
      printf 'not so in time: %s\n%s\n' "$*" "$said" >&2
      return 1
    fi
    sleep 0.5
  done
  printf '%s\n' "$said"
}

fails() { # <command> …: succeeds if the command does not
  local said status
  attempt "$@"
  if ((status == 0)); then echo "succeeded, and must not: $*"; return 1; fi
}

environment() { # <option>: it, with each variable that says how the package index is reached
  local names='PIP_.*|SSL_CERT_.*|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|.*_(PROXY|proxy)'
  compgen -e | sed --quiet --regexp-extended "s/^($names)\$/--$1=\1/p"
}
