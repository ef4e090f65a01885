# What both scripts beside this file use. Each step prints a line. A failed step shows its output and
# ends the script.

step() { # <what is done> <command> …
  local said
  printf '%s … ' "$1"
  shift
  if said=$("$@" </dev/null 2>&1); then echo ok; else echo failed; printf '%s\n' "$said"; exit 1; fi
}

wait_for() { # <seconds> <command> …: until the command succeeds; its last output is shown
  local deadline=$((SECONDS + $1)) said
  shift
  until said=$("$@" 2>&1); do
    if ((SECONDS >= deadline)); then printf 'not so in time: %s\n%s\n' "$*" "$said"; return 1; fi
    sleep 0.5
  done
  printf '%s\n' "$said"
}

fails() { # <command> …: succeeds if the command does not
  if "$@"; then echo "succeeded, and must not: $*"; return 1; fi
}

environment() { # <option>: it, with each variable that says how the package index is reached
  local names='PIP_.*|SSL_CERT_.*|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|.*_(PROXY|proxy)'
  compgen -e | sed --quiet --regexp-extended "s/^($names)\$/--$1=\1/p"
}
