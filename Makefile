# `make up` is the whole product on one machine; `make test` is everything that must hold.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Where it is set every start compiles all that it imports: half of a start's time.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3.11
# Passed to pip, e.g. PIP_ARGS="--find-links /path/to/wheels"
PIP_ARGS ?=
# Passed to `perilune up`, e.g. UP_ARGS="--detach --model /path/to/model"
UP_ARGS ?=
# Passed to pytest, e.g. TEST_ARGS="-k pool"
TEST_ARGS ?=
SOAK_SECONDS ?= 3600
bin := .venv/bin

.PHONY: help env up down test fast rdma check fmt soak peers
help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 8

env: ## build .venv (idempotent)
	@PYTHON="$(PYTHON)" scripts/env $(PIP_ARGS)

up: env ## start a whole cluster here: control plane, gateway, pool, prefill and decode worker
	@exec $(bin)/perilune up $(UP_ARGS)

down: env ## end what `make up` started
	@$(bin)/perilune down

test: env ## everything: system packages, checks, model, tests (30 minutes at most)
	@scripts/test-deps
	@scripts/warm & scripts/check && wait
	@$(bin)/perilune model prepare smollm2
	@scripts/test $(TEST_ARGS)

fast: env ## tests that need no engine, browser or terminal
	@$(bin)/pytest -q -n 2 --dist loadgroup -m "not (vllm or chromium or tmux or heavy or soak)" $(TEST_ARGS)

rdma: env ## RDMA tests in a VM with Soft-RoCE (part of `make test`)
	@scripts/test-deps
	@$(bin)/pytest -q -m rdma $(TEST_ARGS)

check: env ## format, lint, types, import contracts
	@scripts/check

fmt: env ## format and fix what can be fixed
	@$(bin)/ruff check --fix --quiet . || true
	@$(bin)/ruff format .

soak: env ## long runs under load and faults (CONTRIBUTING.md); SOAK_SECONDS=3600
	@$(bin)/perilune model prepare smollm2
	@PERILUNE_SOAK_SECONDS=$(SOAK_SECONDS) $(bin)/pytest -q -m soak --timeout 0 $(TEST_ARGS)

peers: ## the programs that benches compare with, in .venv-peers
	@PYTHON="$(PYTHON)" scripts/peers $(PIP_ARGS)
