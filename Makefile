# The commands of the project; each sets up what it needs. `make help` lists them.
PRESET ?= release
BUILD := build/$(PRESET)
PYTHON := build/venv/bin/python3
JOBS ?= $(shell nproc)
# Text that `make demo` learns: a file or a folder. Default: the C++ standard library's headers.
DATA ?=
# Options of `cosformer bench` for `make bench`, such as BENCH="--threads 1,2 --seconds 600".
BENCH ?=

.PHONY: help setup build demo test bench format format-check lint docs clean

help:
	@echo "make demo     train a small causal cosFormer on text, plot its loss, let it write (DATA=file or folder)"
	@echo "make test     build everything and run every test"
	@echo "make bench    measure the kernels against the machine's peak, and every kind against torch (BENCH=options)"
	@echo "make format   format C++ and Python; make lint checks formatting, layering and Python"
	@echo "make docs     build the documentation site into build/docs"
	@echo "PRESET=debug|asan|tsan|torch-free chooses another build (CMakePresets.json)"

setup:
	@tools/setup.sh $(if $(filter torch-free asan tsan,$(PRESET)),--torch-free)

$(BUILD)/build.ninja: | setup
	cmake --preset $(PRESET)

build: setup $(BUILD)/build.ninja
	cmake --build $(BUILD) -j $(JOBS)

demo: setup $(BUILD)/build.ninja
	cmake --build $(BUILD) -j $(JOBS) --target cosformer
	@tools/demo.sh $(BUILD)/cli/cosformer "$(DATA)"

test: build
	cd $(BUILD) && ctest --output-on-failure -j $(JOBS)
	$(if $(filter torch-free asan tsan,$(PRESET)),,$(PYTESTS))

# A run a folder: each has a conftest.py of its own. A file's tests stay in one process.
PYTESTS = export COSFORMER_BUILD=$(CURDIR)/$(BUILD) COSFORMER_LIBRARY=$(CURDIR)/$(BUILD)/python/libcosformer_torch.so; \
	for part in python cli install; do $(PYTHON) -m pytest -q -n $(JOBS) --dist loadfile tests/$$part || exit 1; done

bench: build
	@tools/bench.sh $(BUILD) $(BENCH)

SOURCES = $(shell git ls-files --cached --others --exclude-standard '*.cc' '*.h')
format: setup
	@build/venv/bin/clang-format -i $(SOURCES)
	@build/venv/bin/ruff format -q .

format-check: setup
	@build/venv/bin/clang-format --dry-run -Werror $(SOURCES)
	@build/venv/bin/ruff format -q --check .
	@echo "formatting: as clang-format and ruff would have it"

lint: format-check
	@$(PYTHON) tools/check_includes.py
	@build/venv/bin/ruff check -q .

docs: setup
	@build/venv/bin/python3 -c 'import material' 2>/dev/null || build/venv/bin/pip install -q -r tools/requirements-docs.txt
	@NO_MKDOCS_2_WARNING=1 build/venv/bin/mkdocs build -q --strict
	@echo "build/docs/index.html"

clean:
	@mkdir -p build
	find build -mindepth 1 -maxdepth 1 ! -name venv -exec rm -rf {} +
