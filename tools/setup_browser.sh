#!/usr/bin/env bash
# Installs the browser of the BrowserGym adapter: Debian's Chromium, and bubblewrap to isolate it.
set -euo pipefail

packages=()
[ -x /usr/lib/chromium/chromium ] || packages+=(chromium)
command -v bwrap >/dev/null || packages+=(bubblewrap)
if [ ${#packages[@]} = 0 ]; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
    exit 0
fi
echo "missing: ${packages[*]} (Debian: apt-get install --no-install-recommends ${packages[*]})" >&2
exit 1
