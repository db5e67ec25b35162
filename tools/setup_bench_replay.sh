#!/usr/bin/env bash
# Installs what `make bench-replay` compares with, under build/: Reverb in a separate Python environment, redis-benchmark.
set -euo pipefail
python=${1:?the Python 3.11 to make the environment with}

if [ ! -e build/reverb/.installed ] || [ requirements/reverb.txt -nt build/reverb/.installed ]; then
    rm -rf build/reverb
    "$python" -m venv build/reverb
    build/reverb/bin/pip install --disable-pip-version-check --quiet -r requirements/reverb.txt
    build/reverb/bin/python -c "import reverb" 2>/dev/null
    touch build/reverb/.installed
fi

if ! command -v redis-benchmark >/dev/null && [ ! -x build/redis-tools/usr/bin/redis-benchmark ]; then
    if ! command -v apt-get >/dev/null; then
        echo "redis-benchmark is missing; bench-replay needs it: put it on the PATH (Debian package redis-tools)" >&2
        exit 1
    fi
    mkdir -p build/redis-tools
    packages=$(apt-cache depends redis-tools | sed -n 's/.*Depends: \(lib\(lzf\|jemalloc\)[^ ]*\)/\1/p')
    # Unpacked, not installed: nothing outside build/ changes.
    (cd build/redis-tools && apt-get download -qq redis-tools $packages && for deb in *.deb; do dpkg-deb -x "$deb" .; done)
fi
