#!/usr/bin/env bash
# Installs system packages that no wheel contains; with the argument `browser` those of the BrowserGym adapter: Debian's
# Chromium, and bubblewrap to isolate it. Without the rights to install, it prints what is missing.
set -euo pipefail

packages=() options=()
# Environments that run commands (shell, code, research, swe) need bubblewrap and the system's Python; swe and swebench
# need git.
command -v bwrap >/dev/null || packages+=(bubblewrap)
if [ "${1:-}" = browser ]; then
    options=(--no-install-recommends)
    [ -x /usr/lib/chromium/chromium ] || packages+=(chromium)
else
    ldconfig -p | grep -q 'libnuma\.so\.1' || packages+=(libnuma1)
    command -v "${CXX:-g++}" >/dev/null || packages+=(g++)
    [ -x /usr/bin/python3 ] || packages+=(python3)
    [ -x /usr/bin/git ] || packages+=(git)
    # The tests of a server whose clock jumps.
    compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null || packages+=(libfaketime)
fi
if [ ${#packages[@]} = 0 ]; then
    exit 0
fi
install=(apt-get install "${options[@]}" "${packages[@]}")
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive "${install[@]}" -y -qq
    exit 0
fi
echo "missing: ${packages[*]} (Debian, Ubuntu: ${install[*]})" >&2
if [ "${1:-}" = browser ]; then
    exit 1
fi
echo "vLLM's CPU build needs libnuma.so.1; learner.compile and its test need a C++ compiler;" >&2
echo "the environments shell, code, research and swe need bubblewrap and /usr/bin/python3; swe and swebench need /usr/bin/git" >&2
[[ " ${packages[*]} " != *" libnuma1 "* ]]
