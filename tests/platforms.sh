#!/usr/bin/env bash
# Runs `make demo` and `make test` on bare machines of Debian, as root on Debian:
#
#   make platforms PLATFORMS="bookworm trixie" STEPS=demo ARGS="-k webhook"
#
# A machine is a fresh copy of a root file system that debootstrap made, with Python, make, git and
# certificates, and a fresh clone of the last commit, in namespaces of its own. The kernel and the
# network are those of this machine. PLATFORMS_CACHE keeps root file systems for 30 days, and logs.
# DEBIAN_MIRROR names another mirror.
set -euo pipefail

SUITES=${*:-bookworm trixie testing}
STEPS=${STEPS:-demo test}
CACHE=${PLATFORMS_CACHE:-/var/cache/imds-relay-platforms}
PACKAGES=python3,python3-venv,make,git,ca-certificates
TREE=/srv/imds-relay
# Everything in these namespaces ends with this script, also when it is killed.
ISOLATED=(setpriv --pdeathsig=KILL unshare --mount --pid --uts --fork --kill-child=KILL)

fail() { printf 'make platforms: %s\n' "$*" >&2; exit 1; }

make_root() { # <suite>: only a complete one gets its name
  local root=$CACHE/roots/$1 log=$CACHE/logs/debootstrap-$1.log
  if [[ -n $(find "$root" -maxdepth 0 -mtime -30 2>/dev/null) ]]; then return; fi
  printf '%s: debootstrap … ' "$1"
  rm -rf --one-file-system "$root" "$root.unfinished"
  "${ISOLATED[@]}" --mount-proc timeout 1h debootstrap --variant=minbase --include=$PACKAGES \
    "$1" "$root.unfinished" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$log" 2>&1 ||
    { tail -30 "$log"; fail "debootstrap failed, see $log"; }
  touch "$root.unfinished"
  mv "$root.unfinished" "$root"
  echo done
}

way_to_the_index() { # the variables that say how pip, curl and git reach a network
  compgen -e | grep -Ex 'PIP_\w+|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|\w+_(PROXY|proxy)' || true
}

show() { # <path> [<path in the root>]: a file or folder of this machine in the root
  local target=$root${2-$1}
  if [[ -d $1 ]]; then mkdir -p "$target"; else mkdir -p "${target%/*}"; : >>"$target"; fi
  mount --rbind "$1" "$target"
}

enter() { # <machine> <suite> <command> …: as process 1 of the namespaces
  local machine=$1 suite=$2 root=$1/root name variables=() settings
  shift 2
  mkdir -p "$machine"/{root,changes,work}
  if [[ -z $(ls "$root") ]]; then
    mount -t overlay -o "lowerdir=$CACHE/roots/$suite,upperdir=$machine/changes,workdir=$machine/work" \
      overlay "$root" || cp -a --reflink=auto "$CACHE/roots/$suite/." "$root"
  fi
  mountpoint -q "$root" || mount --bind "$root" "$root"

  echo bare >"$root/etc/hostname"
  hostname bare
  printf '127.0.0.1 localhost bare\n::1 localhost ip6-localhost ip6-loopback\n' >"$root/etc/hosts"
  rm -f "$root/etc/resolv.conf"
  cat /etc/resolv.conf >"$root/etc/resolv.conf"
  [[ ! -e /etc/pip.conf ]] || cp /etc/pip.conf "$root/etc/pip.conf"
  settings='^Acquire::(https?|Check-Date|Check-Valid-Until|Retries|ForceIPv[46])\b'
  apt-config dump | grep -E "$settings" >"$root/etc/apt/apt.conf.d/90-way-to-the-mirror" || true
  rm -rf "$root/etc/ssl/certs"
  cp -rL /etc/ssl/certs "$root/etc/ssl/certs" 2>/dev/null || true # without links that lead nowhere

  mount -t proc proc /proc # of these processes; mount reads it
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount -t tmpfs -o mode=755 tmpfs "$root/dev"
  for name in null zero full random urandom tty; do show "/dev/$name"; done
  mkdir "$root"/dev/{pts,shm}
  mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
  mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
  ln -s pts/ptmx "$root/dev/ptmx"
  ln -s /proc/self/fd "$root/dev/fd"
  for name in stdin:0 stdout:1 stderr:2; do ln -s "fd/${name#*:}" "$root/dev/${name%:*}"; done
  show "$machine/tree" "$TREE"
  show "$CACHE/archives/$suite" /var/cache/apt/archives
  show "$CACHE/pip" /root/.cache/pip
  for name in $(way_to_the_index); do
    variables+=("$name=${!name}")
    [[ ${!name} != /* || ! -e ${!name} || -e $root${!name} ]] || show "${!name}"
  done

  # A chroot would forbid user namespaces, which tests make.
  cd "$root"
  mkdir -p before
  pivot_root . before
  cd "$TREE"
  umount --lazy /before
  # bash stays process 1 and takes in orphans. What runs in its background would ignore SIGINT.
  env --default-signal --ignore-environment "${variables[@]}" HOME=/root LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin setsid --wait "$@" </dev/null
}

step() { # <suite> <machine> <target>: one line for it, and the end of its log if it fails
  local log=$CACHE/logs/$(date +%F-%H%M%S)-$1-$3.log began=$SECONDS result=passed arguments=()
  [[ $3 == demo ]] || arguments=("ARGS=${ARGS-}")
  printf '%s: make %s … ' "$1" "$3"
  "${ISOLATED[@]}" "$0" --enter "$2" "$1" timeout 4h make "$3" "${arguments[@]}" \
    >"$log" 2>&1 &
  child=$! # waited for, so that a signal ends this script at once
  wait $child || result=failed
  child=
  printf '%s, %s s, %s\n' "$result" $((SECONDS - began)) "$log"
  [[ $3 == demo ]] || grep -E '^=+ .*(passed|failed|error).* in ' "$log" || true
  if [[ $result == failed ]]; then tail -30 "$log"; failed=1; fi
}

if [[ ${1-} == --enter ]]; then
  shift
  enter "$@"
  exit
fi

[[ $EUID == 0 ]] || fail 'run it as root: it mounts file systems and installs packages in them'
for program in debootstrap git unshare setpriv pivot_root; do
  command -v $program >/dev/null || fail "install $program (apt-get install debootstrap git util-linux)"
done
for suite in $SUITES; do
  [[ $suite =~ ^[a-z]+$ ]] || fail "expected suites of Debian such as bookworm, got '$suite'"
done
mkdir -p "$CACHE"/{logs,roots,pip}
exec 9>"$CACHE/lock"
flock --nonblock 9 || fail "another run uses $CACHE; wait for it, or set PLATFORMS_CACHE"
rm -rf --one-file-system "$CACHE"/machine.* # of runs that were killed
machine='' child=''
end() {
  [[ -z $child ]] || { kill -KILL "$child" && wait "$child" || sleep 1; }
  [[ -z $machine ]] || rm -rf --one-file-system "$machine"
}
trap end EXIT
trap 'exit 1' INT TERM
failed=0
for suite in $SUITES; do
  make_root "$suite"
  mkdir -p "$CACHE/archives/$suite/partial"
  machine=$(mktemp --directory "$CACHE/machine.XXXXXX")
  chmod 0755 "$machine"
  git clone --quiet --no-hardlinks "$(dirname "$0")/.." "$machine/tree"
  for target in $STEPS; do step "$suite" "$machine" "$target"; done
  rm -rf --one-file-system "$machine"
done
exit $failed
