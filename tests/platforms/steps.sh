# What both scripts beside this file use. One line for each step; a failed step shows all output and ends the script.

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

environment() { # the variables that say how the package index is reached, as options of the form --<name>=NAME
  compgen -e | sed -nE "s/^(PIP_.*|SSL_CERT_.*|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|.*_(PROXY|proxy))\$/--$1=\1/p"
}
