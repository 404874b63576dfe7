# make serve  - a model on http://127.0.0.1:8000, installing and fetching what is missing
# make test   - the test suite;  make test-long - the sweeps;  make test-sanitize - the C++ by itself
MODEL ?= qwen2.5-coder-0.5b
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BUILT_FROM := pyproject.toml CMakeLists.txt $(wildcard csrc/*)

.PHONY: serve install test test-long test-sanitize lint bench clean

serve: $(VENV)/.installed
	@exec $(BIN)/toque serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

install: $(VENV)/.installed

# Runs again only when what is compiled or depended on has changed: Python files are used in place.
$(VENV)/.installed: $(BUILT_FROM) scripts/check-tools.sh
	@sh scripts/check-tools.sh $(PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing toque (the first time takes a minute: packages and the C++ kernels)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.tested: $(VENV)/.installed scripts/install-test-tools.sh
	@sh scripts/install-test-tools.sh $(BIN)/python
	@touch $@

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not long"

test-long: $(VENV)/.tested
	$(BIN)/python -m pytest -m long

# Kernels under the address and undefined-behaviour sanitizers, the pool under the thread sanitizer, and
# NEON under qemu where aarch64-linux-gnu-g++ and qemu-aarch64 are installed.
test-sanitize: $(VENV)/.tested
	$(BIN)/python -m pytest tests/kernels/test_pool.py tests/kernels/test_native.py

bench: $(VENV)/.installed
	$(BIN)/toque bench naive $(MODEL)

clean:
	rm -rf $(VENV) build
