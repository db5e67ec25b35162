#!/usr/bin/env bash
# Installs torch's build for CPUs with the Python $1: from where pip looks, else from PyTorch's index. PyPI's build for
# x86-64 is for CUDA, and cannot be imported without 2 GB of further packages.
set -euo pipefail

pin="$(grep '^torch==' requirements/torch.txt)"
if "$1" -c "import sys, torch; sys.exit('torch==' + torch.__version__.split('+')[0] != '$pin')" 2>/dev/null; then
    exit 0
fi
install=("$1" -m pip install --disable-pip-version-check --quiet --no-deps --no-compile)
if "${install[@]}" "$pin+cpu" 2>/dev/null; then
    exit 0
fi
if "${install[@]}" --index-url https://download.pytorch.org/whl/cpu "$pin"; then
    exit 0
fi
echo "no build of torch for CPUs was found for this Python ($("$1" --version)). Name an index that has one, as" >&2
echo "PIP_EXTRA_INDEX_URL=URL make setup, or take PyPI's, 3 GB, which runs on CPUs too: $1 -m pip install $pin; make setup" >&2
exit 1
