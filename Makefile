# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test check bench clean

demo: $(INSTALLED)  ## generate text with the embedded model and show what it cost
	$(BIN)/python examples/demo.py

test: $(INSTALLED)  ## the whole test suite
	$(BIN)/python -m pytest --numprocesses auto

check: $(INSTALLED)  ## style, types, and the rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

bench: $(INSTALLED)  ## speed on this machine
	$(BIN)/quire bench startup
	$(BIN)/quire bench throughput decode single rose
	$(BIN)/quire bench throughput rose --attention gather
	$(BIN)/quire bench memory

clean:
	rm -rf .venv build dist

$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/quire/ops/cpu/csrc/*)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
