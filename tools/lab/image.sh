#!/usr/bin/env bash
# `make image`: build the image of the Dockerfile, and train in it. As root, with buildah and mmdebstrap; no daemon, and
# no registry: its base has Debian's own Python 3.11 instead of that of python:3.11-slim-bookworm. The arguments are for
# `buildah build`: -v mounts a package index of this machine, as RUN gets no variables.
set -euo pipefail
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs

mkdir -p build
mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3.11,python3.11-venv bookworm build/image-base.tar
base=$(buildah from scratch)
buildah add --quiet "$base" build/image-base.tar /
buildah commit --quiet --rm "$base" docker.io/library/python:3.11-slim-bookworm
rm build/image-base.tar

buildah build --pull=never --network=host --layers=false "$@" -t slipstream .
container=$(buildah from --pull-never slipstream)
trap 'buildah rm "$container" > /dev/null' EXIT
buildah run "$container" -- slipstream doctor
buildah run "$container" -- slipstream up /slipstream/conf/quickstart.yaml run.name=image warm_start.episodes=200 learner.steps=3
