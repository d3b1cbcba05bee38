# Everything from a bare clone: each target makes .venv and installs into it first, if need be.
#   make demo ARGS="--kill"      make test ARGS="-k pool"      make test PYTHON=python3.12

BIN := .venv/bin
READY := .venv/ready
VLLM_BIN := .venv-vllm/bin
VLLM_READY := .venv-vllm/ready
PYTHON ?=
ARGS ?=

.PHONY: help demo test lint format soak gpu bench docs install vllm test-vllm clean

help:
	@echo "make demo    two nodes of a local Ray cluster share one KV cache (ARGS: see kvfabric demo --help)"
	@echo "make test    the linters, then the tests (ARGS: options of pytest)"
	@echo "make lint    ruff, basedpyright, the import contracts"
	@echo "make format  let ruff mend what it can"
	@echo "make soak    the long random suites, from a new seed or KVFABRIC_SEED"
	@echo "make gpu     every check that needs a GPU"
	@echo "make bench   the benchmarks (ARGS: which, --json)"
	@echo "make vllm    .venv-vllm: a real vLLM on the CPU, with kvfabric (2.3 GB)"
	@echo "make test-vllm  the tests with a real vLLM (ARGS: options of pytest)"
	@echo "make docs    docs/metrics.md from the table in the code"
	@echo "make clean   remove .venv and everything built"

demo: $(READY)
	$(BIN)/kvfabric demo $(ARGS)

test: lint
	$(BIN)/pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# An hour for each test: a soak ends by its own count of steps, not by the clock.
soak: $(READY)
	@seed="$${KVFABRIC_SEED:-$$(date +%s)}"; echo "KVFABRIC_SEED=$$seed"; \
	KVFABRIC_SEED="$$seed" $(BIN)/pytest -m soak --timeout=3600 \
		--hypothesis-profile=soak --hypothesis-seed="$$seed" $(ARGS)

# -P: this folder stays off the import path, so that only `kvfabric` is found.
gpu: $(READY)
	$(BIN)/python -P -m kvfabric.kernels.gpu_checks $(ARGS)
	$(BIN)/pytest -m gpu

bench: $(READY)
	$(BIN)/kvfabric bench $(ARGS)

docs: $(READY)
	$(BIN)/python -P -c 'from kvfabric.fabric.metrics import markdown; print(markdown(), end="")' > docs/metrics.new
	mv docs/metrics.new docs/metrics.md

# vLLM pins other versions of what both need, so it lives in an environment of its own.
vllm: $(VLLM_READY)

test-vllm: $(VLLM_READY)
	$(VLLM_BIN)/pytest -m real_vllm tests/real_vllm $(ARGS)

install: $(READY)

# Sets `found` to a Python that will do, or stops and says what to do.
define FIND_PYTHON
python="$(PYTHON)"; found=""; \
	for each in $${python:-python3.11 python3.12 python3.13 python3 python}; do \
		if "$$each" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
		then found="$$each"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "kvfabric needs Python 3.11 or newer; none of these is: $${python:-python3.11 python3.12 python3.13 python3 python}." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; \
	fi
endef

$(VLLM_READY): pyproject.toml constraints-vllm.txt
	@$(FIND_PYTHON); \
	echo "making .venv-vllm with $$("$$found" --version), 2.3 GB and about two minutes with a fast network"; \
	"$$found" -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r constraints-vllm.txt
	$(VLLM_BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -e .
	@touch $(VLLM_READY)

$(READY): pyproject.toml constraints.txt
	@$(FIND_PYTHON); \
	echo "making .venv with $$("$$found" --version), a few GB and about a minute with a fast network"; \
	"$$found" -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

clean:
	rm -rf .venv .venv-vllm build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
