# One file for CPU, CUDA and ROCm. `athanor container build` writes the command for the card of this machine:
#
#   docker build -t athanor:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#   docker build -t athanor:cuda --build-arg CHIP=cuda .
#   docker build -t athanor:rocm --build-arg CHIP=rocm --build-arg TORCH_INDEX=https://download.pytorch.org/whl/rocm7.2 .
#   docker build -t athanor:rocm --build-arg CHIP=rocm --build-arg BASE=rocm/pytorch:TAG .      (keeps the torch of the base)
#
# and `athanor container run` the one to start it. The image's own code and packages lie in /opt/athanor; /athanor is
# the one volume, with a copy of the code and all that is made: docs/machine.md, Containers.
ARG BASE=python:3.12-slim
FROM ${BASE}
USER root

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
       g++ gcc git libc6-dev make tini util-linux python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Not root: root ignores the read-only bit of cached outputs, and a stage that
# wrote through a hard link would corrupt DVC's cache. The same number in every
# image, so that one volume serves all; in Ubuntu's from 24.04 on it is taken.
RUN other=$(getent passwd 1000 | cut -d: -f1); [ -z "$other" ] || userdel "$other"; \
    useradd --create-home --uid 1000 athanor && mkdir -p /athanor /opt/athanor && chown athanor /athanor /opt/athanor
USER athanor
WORKDIR /opt/athanor
# Where vendors' images keep the Python that has torch: ROCm's in /opt/venv, older ones of PyTorch's in /opt/conda.
ENV PATH=/opt/athanor/.venv/bin:/opt/venv/bin:/opt/conda/bin:${PATH}

# NVIDIA's images pin packages of all later installations to their own versions.
ENV PIP_CONSTRAINT=

# Dependencies first, so that a change of code does not install them again.
# tools/install.py keeps a torch that the base image already has. A build sees no card, so the chip is named.
COPY --chown=athanor requirements.txt ./
COPY --chown=athanor tools/install.py tools/
COPY --chown=athanor athanor/hardware/cards.py athanor/hardware/
COPY --chown=athanor athanor/runtime/start.py athanor/runtime/
ARG CHIP=cpu
# Of a public index: a build argument stays in the image's history, so none with a password belongs here.
ARG TORCH_INDEX=
RUN CHIP=${CHIP} TORCH_INDEX=${TORCH_INDEX} PIP_NO_CACHE_DIR=1 python3 -B tools/install.py

COPY --chown=athanor . .
# The code, by which tools/entry.sh sees what a volume of an earlier image holds; parameters and results are none.
RUN find . \( -path ./.venv -o -path ./metrics -o -path ./plots \) -prune -o -type f \
        ! -path ./params.yaml ! -path ./dvc.lock ! -path ./.image -print0 | sort -z | xargs -0 sha256sum > .image

# DVC's state database lives in /var/tmp by default and would be lost with the
# container: every start would hash all data again. HOME holds caches of the hub and of compilers.
ENV DVC_SITE_CACHE_DIR=/athanor/.dvc/site \
    MLFLOW_TRACKING_URI=sqlite:////athanor/.athanor/mlflow.db \
    HOME=/athanor/.athanor/home \
    LOGNAME=athanor
WORKDIR /athanor
VOLUME ["/athanor"]

# SIGINT reaches dvc and the stage (tini -g): dvc waits while the stage saves.
# SIGTERM would end dvc at once and the kernel would kill the trainer with it.
STOPSIGNAL SIGINT
ENTRYPOINT ["tini", "-g", "--", "/opt/athanor/tools/entry.sh"]
CMD ["athanor", "repro"]
