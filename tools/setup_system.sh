#!/usr/bin/env bash
# System libraries that no wheel brings. Installs them where it may, else says what to install.
set -euo pipefail

if ldconfig -p | grep -q 'libnuma\.so\.1'; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    apt-get install -y -qq libnuma1
else
    echo "libnuma.so.1 is missing, which vLLM's CPU build loads: install it (Debian, Ubuntu: apt-get install libnuma1)" >&2
    exit 1
fi
