# One file for CPU, CUDA and ROCm: the base image brings torch (or does not, for CPU).
#
#   docker build -t athanor .                                              CPU
#   docker build -t athanor --build-arg BASE=pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime .
#   docker build -t athanor --build-arg BASE=rocm/pytorch:latest .
#
#   docker run --stop-timeout 300 -v athanor-data:/athanor/data -v athanor-models:/athanor/models \
#     -v athanor-state:/athanor/.athanor -v athanor-cache:/athanor/.dvc/cache -v athanor-site:/athanor/.dvc/site athanor
#
# For a GPU the run needs more options: docs/machine.md, Containers.
#
# The volumes hold what is worth keeping: outputs, checkpoint slots and journals
# (with the tracking database), DVC's cache and its state.
ARG BASE=python:3.12-slim
FROM ${BASE}

RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc git libc6-dev make tini util-linux python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Not root: root ignores the read-only bit of cached outputs, and a stage that
# wrote through a hard link would corrupt DVC's cache.
RUN useradd --create-home --uid 1000 athanor
WORKDIR /athanor
RUN chown athanor /athanor
USER athanor

# Dependencies first, so that a change of code does not install them again.
# tools/install.py keeps a torch that the base image already has.
COPY --chown=athanor requirements.txt ./
COPY --chown=athanor tools/install.py tools/
# Of a public index: a build argument stays in the image's history, so none with a password belongs here.
ARG TORCH_INDEX=
RUN TORCH_INDEX=${TORCH_INDEX} python3 tools/install.py

COPY --chown=athanor . .
# A queued experiment needs a Git repository; a build context without .git gets one.
RUN git rev-parse -q --verify HEAD >/dev/null 2>&1 \
    || (git init -q -b main && git add -A && git -c user.name=athanor -c user.email=athanor@localhost commit -qm image)

# DVC's state database lives in /var/tmp by default and would be lost with the
# container: every start would hash all data again.
ENV DVC_SITE_CACHE_DIR=/athanor/.dvc/site \
    MLFLOW_TRACKING_URI=sqlite:////athanor/.athanor/mlflow.db \
    PATH=/athanor/.venv/bin:${PATH} \
    PYTORCH_ALLOC_CONF=expandable_segments:True
# A named volume takes the owner of the directory it covers; one that does not exist would belong to root.
RUN mkdir -p data models .athanor .dvc/cache .dvc/site
VOLUME ["/athanor/data", "/athanor/models", "/athanor/.athanor", "/athanor/.dvc/cache", "/athanor/.dvc/site"]

# SIGINT reaches dvc and the stage (tini -g): dvc waits while the stage saves.
# SIGTERM would end dvc at once and the kernel would kill the trainer with it.
STOPSIGNAL SIGINT
ENTRYPOINT ["tini", "-g", "--", "tools/entry.sh"]
CMD ["make", "repro"]
