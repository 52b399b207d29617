# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
BIN := .venv/bin
RUNS := .venv/runs
INSTALLED := .venv/installed
LOWEST := .venv-lowest/installed
SUITE := -m pytest --numprocesses auto --dist worksteal --durations 25
BUILT_FROM := pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/quire/ops/cpu/csrc/*)
INSTALL := -m pip install --disable-pip-version-check --no-compile
# Without bytecode each of the suite's processes would compile torch, transformers and Quire for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-fleet test test-fast test-long test-lowest check audit docs docs-version bench bench-peers bench-long clients formats encoders wheel sanitize sanitize-threads emulate clean

demo: $(RUNS)  ## generate text with the embedded model and show what it cost
	$(BIN)/python examples/demo.py

demo-fleet: $(RUNS)  ## two replicas and a gateway; one replica is killed in the middle of an answer
	$(BIN)/python examples/fleet.py

test: $(INSTALLED)  ## the whole test suite, or some of it: TESTS="tests/ops tests/test_llm.py"
	$(BIN)/python $(SUITE) $(TESTS)

test-fast: $(INSTALLED)  ## the inner loop: what takes long is left out (the marker `slow`)
	$(BIN)/python $(SUITE) -m "not slow"

test-long: $(INSTALLED)  ## everything with all repetitions: the random runs, the compiled kernels, what has one result in many ways
	$(BIN)/python $(SUITE) --long --timeout 3600

test-lowest: $(LOWEST)  ## the same with the lowest versions that pyproject.toml allows, in an environment of their own
	.venv-lowest/bin/python $(SUITE)

check: $(INSTALLED)  ## style, types, and the rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python tools/check_prose.py
	$(BIN)/python -m pytest tests/test_architecture.py
	$(BIN)/mkdocs build --strict --quiet

docs: $(INSTALLED)  ## the documentation: build/site/index.html
	$(BIN)/mkdocs build --strict

VERSION = dev
docs-version: $(INSTALLED)  ## the documentation of one version next to the others, on the branch gh-pages: VERSION=0.1.0 ALIAS=latest PUSH=--push
	$(BIN)/mike deploy --update-aliases $(PUSH) $(VERSION) $(ALIAS)
	$(BIN)/mike set-default --allow-undefined $(PUSH) latest

# GHSA-rrmf-rvhw-rf47: see SECURITY.md
audit: $(INSTALLED)  ## known vulnerabilities of the lowest versions; asks an advisory service on the Internet
	test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && .venv-audit/bin/pip install --quiet --disable-pip-version-check pip-audit; }
	$(BIN)/python tools/lowest.py audit > .venv-audit/lowest.txt
	.venv-audit/bin/pip-audit --strict --vulnerability-service osv --no-deps --disable-pip --requirement .venv-audit/lowest.txt --ignore-vuln GHSA-rrmf-rvhw-rf47

bench: $(INSTALLED)  ## speed on this machine
	$(BIN)/quire bench startup
	$(BIN)/quire bench throughput decode single rose
	$(BIN)/quire bench throughput rose --attention gather
	$(BIN)/quire bench memory
	$(BIN)/python bench/studies/planning.py

bench-peers: $(INSTALLED)  ## Quire beside other engines: PEERS="--models DIR --vllm PYTHON ...", see --help
	$(BIN)/python -m quire_bench.peers $(PEERS)

ROUNDS = 1000
FIRST = 1000
bench-long: $(INSTALLED)  ## with ROUNDS=1000: 100,000,000 operations of the block manager, 1,000,000 simulated requests, 1,000 engines compared with requests alone, 5,000 configs of models; the server: 20,000 cases, 10,000 clients that hang up, an hour; a fleet: 1,000 rounds with kills, hangs and partitions. FIRST is the first seed
	$(BIN)/python -m tests.cache.machine $(FIRST) $(ROUNDS) 100000
	$(BIN)/quire simulate --requests $(ROUNDS)000 --blocks 100000
	$(BIN)/python -m tests.models.random_configs $$((5 * $(ROUNDS))) $(FIRST)
	$(BIN)/python -m tests.engine.differential $(ROUNDS) $(FIRST)
	$(BIN)/python -m tests.server.fuzz $$((20 * $(ROUNDS)))
	$(BIN)/python -m tests.server.storm $$((10 * $(ROUNDS)))
	$(BIN)/python -m tests.fleet.chaos $(ROUNDS) --first $(FIRST)
	$(BIN)/quire bench soak --minutes $$((60 * $(ROUNDS) / 1000))

clients: $(INSTALLED)  ## what people use against the server: lm_eval, a load generator, packages for agents, in environments of their own
	$(BIN)/python tools/check_clients.py
	$(BIN)/python tools/check_agents.py

formats: $(INSTALLED)  ## checkpoints that compressed-tensors writes, in an environment of its own
	$(BIN)/python tools/check_formats.py

encoders: $(INSTALLED)  ## a published model against sentence-transformers, in an environment of its own
	$(BIN)/python tools/check_encoders.py

wheel: $(INSTALLED)  ## one wheel for every Python, that of quire-bench, and both source distributions: dist/
	rm -rf dist
	$(BIN)/pip wheel --verbose --disable-pip-version-check --no-deps --config-settings cmake.define.QUIRE_ISAS=all --wheel-dir dist/plain .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --plat manylinux_2_28_$$(uname -m) --wheel-dir dist dist/plain/*.whl
	rm -rf dist/plain
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist ./bench
	$(BIN)/python -m build --sdist --outdir dist .
	$(BIN)/python -m build --sdist --outdir dist bench

sanitize: $(INSTALLED)  ## the operators' tests with the native kernels under AddressSanitizer and UBSan
	cmake -S . -B build/sanitize -D QUIRE_SANITIZE=memory
	cmake --build build/sanitize --parallel
	OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest tests/ops tests/models/test_native.py tests/models/test_experts.py -k "cpu or gguf_blocks or test_native or test_experts" --numprocesses auto --timeout 1800 --native-library build/sanitize/libquire_cpu.so

sanitize-threads: $(INSTALLED)  ## calls from several threads, and several threads in a call, with the native kernels under ThreadSanitizer
	cmake -S . -B build/sanitize-threads -D QUIRE_SANITIZE=threads
	cmake --build build/sanitize-threads --parallel
	TSAN_OPTIONS=halt_on_error=1:suppressions=tests/ops/cpu/threads.supp LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" \
	setarch --addr-no-randomize $(BIN)/python -m pytest -s tests/ops/test_threads.py tests/ops/cpu/test_recurrent_program.py tests/models/test_native.py tests/models/test_experts.py -k "threads and not reference and not gather and not triton" --timeout 1800 --native-library build/sanitize-threads/libquire_cpu.so

emulate: $(INSTALLED)  ## the operators' tests on an emulated Arm processor; needs a cross compiler and QEMU, see docs/develop/add-an-instruction-set.md
	$(BIN)/python tools/emulate.py

clean:
	rm -rf .venv .venv-* build dist

$(RUNS): $(BUILT_FROM)  # in three steps, since pip is silent while it unpacks; the second one shows the compiler's progress
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) --constraint constraints.txt torch numpy
	$(BIN)/python $(INSTALL) --verbose --no-deps --editable .
	$(BIN)/python $(INSTALL) --constraint constraints.txt quire
	touch $@

$(INSTALLED): $(RUNS) bench/pyproject.toml
	$(BIN)/python $(INSTALL) --constraint constraints.txt 'quire[dev]' --editable './bench[all]'
	$(BIN)/python $(INSTALL) --verbose --no-deps --config-settings cmake.define.QUIRE_ISAS=tests --editable .
	touch $@

$(LOWEST): $(BUILT_FROM) bench/pyproject.toml tools/lowest.py | $(INSTALLED)
	rm -rf .venv-lowest
	$(PYTHON) -m venv .venv-lowest
	$(BIN)/python tools/lowest.py install > .venv-lowest/constraints.txt
	.venv-lowest/bin/python $(INSTALL) --constraint .venv-lowest/constraints.txt --editable '.[dev]' --editable './bench[all]'
	touch $@
