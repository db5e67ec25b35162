#!/usr/bin/env bash
# What no wheel brings. Installs it where it may, else says what to install.
set -euo pipefail

packages=()
if ! ldconfig -p | grep -q 'libnuma\.so\.1'; then
    packages+=(libnuma1)
fi
if ! command -v "${CXX:-g++}" >/dev/null; then
    packages+=(g++)
fi
# Environments that run commands (shell, code, research, swe) do so in bubblewrap, with the system's own Python inside, or not at all;
# swe and swebench work in git repositories.
if ! command -v bwrap >/dev/null; then
    packages+=(bubblewrap)
fi
if [ ! -x /usr/bin/python3 ]; then
    packages+=(python3)
fi
if [ ! -x /usr/bin/git ]; then
    packages+=(git)
fi
if [ ${#packages[@]} = 0 ]; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    apt-get install -y -qq "${packages[@]}"
    exit 0
fi
echo "missing: ${packages[*]} (Debian, Ubuntu: apt-get install ${packages[*]})" >&2
echo "vLLM's CPU build loads libnuma.so.1; learner.compile, and its test, need a C++ compiler;" >&2
echo "the environments shell, code, research and swe refuse to be made without bubblewrap and /usr/bin/python3, swe and swebench without /usr/bin/git" >&2
[[ " ${packages[*]} " != *" libnuma1 "* ]]
