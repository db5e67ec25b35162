# An image of Slipstream, for learners and actors. For CUDA: --build-arg SETUP=setup-gpu, and NVIDIA's container runtime.
FROM python:3.11-slim-bookworm
ARG SETUP=setup
ENV PIP_NO_CACHE_DIR=1 DEBIAN_FRONTEND=noninteractive OMP_NUM_THREADS=1
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /slipstream
COPY . .
RUN make $SETUP && rm -rf /var/lib/apt/lists/*
ENV PATH=/slipstream/.venv/bin:$PATH
# Runs are written to the folder `runs` of the working directory, unless run.root is set.
WORKDIR /data
CMD ["slipstream", "--help"]
