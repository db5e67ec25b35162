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
if [ ${#packages[@]} = 0 ]; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    apt-get install -y -qq "${packages[@]}"
    exit 0
fi
echo "missing: ${packages[*]} (Debian, Ubuntu: apt-get install ${packages[*]})" >&2
echo "vLLM's CPU build loads libnuma.so.1; learner.compile, and its test, need a C++ compiler" >&2
[[ " ${packages[*]} " != *" libnuma1 "* ]]
