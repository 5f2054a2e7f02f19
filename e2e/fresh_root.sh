#!/usr/bin/env bash
# fresh_root.sh WORK COMMAND...: runs COMMAND as on a Debian that has only its Python: a root
# directory of its own with this machine's /usr read-only, without /usr/local, and nothing of this
# checkout. Needs root and a Debian (or a relative) with python3-venv.
#   WORK/wheels    what pip may install from, read-only at /wheels
#   WORK/packages  packages that are too large to install each time, read-only at /packages
#   WORK/root      the home directory, which stays from one command to the next
# The network is the machine's own, so that the loopback has the hub.
set -euo pipefail
if [ "${FOVEAL_FRESH_ROOT:-}" != inside ]; then
  [ "$(id -u)" = 0 ] || { echo "fresh_root.sh: needs root" >&2; exit 2; }
  FOVEAL_FRESH_ROOT=inside exec unshare --mount -- "$0" "$@"
fi
unset FOVEAL_FRESH_ROOT
work=$(realpath "$1")
shift
mount --make-rprivate /
new=$work/mount
mkdir -p "$new" "$work/root"
mount -t tmpfs -o mode=755 tmpfs "$new"
mkdir -p "$new"/{usr,etc,proc,sys,dev,run,root,home,wheels,packages,var/tmp}
mkdir -m 1777 "$new/tmp"
only_read() { # SOURCE TARGET
  mount --bind "$1" "$2"
  mount -o remount,bind,ro "$2"
}
only_read /usr "$new/usr"
mount -t tmpfs tmpfs "$new/usr/local"
for name in bin sbin lib lib64; do
  if [ -L "/$name" ]; then ln -s "$(readlink "/$name")" "$new/$name"; fi
done
for file in passwd group hosts nsswitch.conf ld.so.cache ld.so.conf localtime os-release; do
  if [ -e "/etc/$file" ]; then cp -L "/etc/$file" "$new/etc/$file"; fi
done
for name in proc sys dev; do mount --rbind "/$name" "$new/$name"; done
mount --bind "$work/root" "$new/root"
only_read "$work/wheels" "$new/wheels"
only_read "$work/packages" "$new/packages"
cd "$new/root"
exec chroot "$new" /usr/bin/env --chdir=/root "$@"
