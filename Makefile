# make setup   only install what is needed into .venv
# make repro   build everything: install, download, train, evaluate, export, summary
# make test    what a change must pass: real DVC, one micro build (TESTS=tests/model: a part of them)
# make quick     the tests that start no process: on every save
# make test-all  all tests: drills, kills at many moments, browser, fuzz at depth too
# make lint      what CI asks of the code's form: ruff and mypy
# make serve   chat page and API of the exported models (SERVE="--port 9000": further arguments)
# make chat    talk to the exported model in the terminal (CHAT="--temperature 0.5")
# make ui      look at the runs in MLflow
# make bench-train  speed beside transformers at equal loss (half an hour)
# make bench-data   speed, memory and recall of the data engine, beside datatrove (a quarter of an hour)

PYTHON ?= python3
## `exec` in a recipe asks for a shell: make 3.81, the one of macOS, looks for a bare command in the PATH it was called with.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
unexport MLFLOW_RUN_ID PYTHONPATH PYTHONHOME

.PHONY: help setup repro quick test test-all lint serve chat ui deps bench-data bench-train

help:
	@sed -n 's/^# //p' Makefile

setup:
	@exec $(PYTHON) tools/install.py

repro: setup
	@exec python -m athanor repro

PYTEST = exec python -m pytest -q --numprocesses logical --maxprocesses 4 --dist loadgroup --no-loadscope-reorder

quick: setup
	@$(PYTEST) -m "not process and not long and not extra" $(TESTS)

test: setup
	@exec python -m pip install --quiet --disable-pip-version-check --requirement requirements-clients.txt
	@$(PYTEST) -m "not long and not extra" $(TESTS)

test-all: test
	@$(PYTEST) -m "long or extra" $(TESTS)

lint: setup
	@exec python -m pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt
	@exec ruff check .
	@exec ruff format --check .
	@exec mypy
	@exec mypy --platform darwin athanor stages

serve: setup
	@exec python -m athanor serve $(SERVE)

chat: setup
	@exec python -m athanor chat $(CHAT)

ui: setup
	@exec python -m athanor ui

deps: setup
	@exec python -m athanor deps --fix

bench-data: setup
	@exec python -m tools.bench_data $(BENCH)

bench-train: setup
	@exec python -m tools.bench_train $(BENCH)
