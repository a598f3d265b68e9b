# Everything a checkout can do. Each target makes its own environment first (.venv), from pinned
# packages; the second time that takes no time.
#
#   make demo    generate three texts twice, plain and speculative, and compare
#   make test    linters, types and tests; on CI, or as root, it installs the services they need
#   make lint    linters and types only
#   make format  rewrite the sources in the project's format
#   make bench-check  are the numbers in README.md and docs/ those of their records?
#   make venv    the environment alone; then  .venv/bin/draftwood --help
#   make clean   remove the environment and what tools left behind
#
#   PYTHON=python3.12            which Python (3.11 or newer, with its venv module)
#   TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
#                                a smaller PyTorch for a machine without a CUDA device

PYTHON ?= python3
VENV ?= .venv
SERVERS ?= .venv-servers
TORCH_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SERVICES := redis-server prometheus chromium chromedriver java systemd-analyze
GET_SERVICES := apt-get update -qq && apt-get install -y -qq --no-install-recommends \
  redis-server prometheus chromium chromium-driver default-jre-headless systemd

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint format venv services servers clean bench-check

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

demo: $(VENV)/.run
	@$(BIN)/draftwood demo

# On CI a service that is missing fails its tests; elsewhere they are skipped with a reason.
test: lint services servers
	DRAFTWOOD_REQUIRE_SERVICES=$(CI) DRAFTWOOD_REQUIRE_BROWSER=$(CI) $(BIN)/pytest

services:
	@for program in $(SERVICES); do command -v $$program >/dev/null || missing=1; done; \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" = 0 ]; then $(GET_SERVICES); \
	elif [ -n "$(CI)" ]; then sudo -n sh -c '$(GET_SERVICES)'; \
	fi || true

servers: $(VENV)/.dev
	@$(MAKE) --no-print-directory $(SERVERS)/.made || echo "no TorchServe, no LitServe: see above"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-check: $(VENV)/.run
	$(BIN)/draftwood bench check

venv: $(VENV)/.run

clean:
	rm -rf $(VENV) $(SERVERS) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is not Python 3.11 or newer: make ... PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "error: $(PYTHON) has no venv module: apt install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# PyTorch first and alone: it is the one large package, and may come from another index.
$(VENV)/.torch: $(VENV)/.made requirements.txt
	$(PIP) install $(TORCH_ARGS) -c requirements.txt torch
	@touch $@

$(VENV)/.run: $(VENV)/.torch requirements.txt pyproject.toml
	$(PIP) install -r requirements.txt
	$(PIP) install --no-deps -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run requirements-dev.txt
	$(PIP) install -r requirements-dev.txt
	@touch $@

# TorchServe and LitServe bring packages that change how our own server runs (uvloop): an
# environment of their own, which finds PyTorch and the rest in ours.
$(SERVERS)/.made: $(VENV)/.dev requirements-servers.txt
	$(BIN)/python -m venv --clear $(SERVERS)
	$(SERVERS)/bin/python -m pip --disable-pip-version-check install --no-deps -r requirements-servers.txt
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(SERVERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-shared.pth"
	@touch $@
