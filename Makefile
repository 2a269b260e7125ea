# Everything a fresh machine needs: `make demo` and `make test` build .venv by themselves, and `make test`
# installs the system packages that its tests need, or says how.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
EXTRAS := megatron,deepspeed,plots,cluster,ray,kubernetes,dev
STAMP := $(VENV)/.installed
RELEASES := $(VENV)/.releases
# Tests start thousands of processes, and each would compile all the modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: core-install docs reference demo demo-deepspeed system-packages test test-slow test-nightly support-matrix training-matrix lint types check clean

system-packages:
	@bash tools/system_packages.sh

$(STAMP): pyproject.toml constraints.txt tools/make_venv.sh
	@bash tools/make_venv.sh $(VENV) "$(EXTRAS)"

$(RELEASES): $(STAMP) tools/releases.txt tools/bridge.txt tools/launchers.txt tools/nemo_run.txt tools/make_releases.sh
	@bash tools/make_releases.sh $(VENV)

demo: $(STAMP)
	@bash examples/demo/run.sh $(PY)

demo-deepspeed: $(STAMP)
	@bash examples/demo_deepspeed/run.sh $(PY)

# A test that starts processes waits for them a good part of its time, so that three share two cores.
test: system-packages $(STAMP) $(RELEASES)
	$(PY) -m pytest -m "not slow and not nightly" --durations=30 --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Only the files that have slow tests: three processes would otherwise import every test file.
test-slow: system-packages $(STAMP) $(RELEASES)
	$(PY) -m pytest -m "slow and not nightly" --durations=30 --numprocesses 3 --dist worksteal --timeout 600 \
		$$(grep -rl --include='test_*.py' 'mark\.slow' tests | sort)

# The tests of minutes each. A run that was ended goes on with those that have not passed; NIGHTLY="--most 10"
# runs ten of them, and without .matrix/nightly all run again.
test-nightly: system-packages $(STAMP) $(RELEASES)
	$(PY) -m tools.nightly_tests .matrix/nightly $(NIGHTLY)

# What a machine without a framework downloads, and how long it takes to answer.
core-install: $(STAMP)
	@bash tools/core_install.sh $(PY)

# Every release tuned and trained, and the table of docs/support.md from what the tests saw. What has run is kept
# in .matrix, so that a run that was ended goes on with the next release; MATRIX="--release 0.18.2" runs one again.
support-matrix: system-packages $(STAMP) $(RELEASES)
	$(PY) tools/support_matrix.py .matrix --run $(MATRIX)

# Every training of the runtime's matrix, on gloo and on groups that are as strict as NCCL, with Megatron's layers
# and the stand-in for Transformer Engine's, and the table of docs/gpu.md from it. A run that was ended goes on with
# the cases that have not passed; TRAININGS="--most 10" runs ten of them, and without .matrix/trainings all run again.
training-matrix: system-packages $(STAMP) $(RELEASES)
	$(PY) -m tools.training_matrix .matrix/trainings --run $(TRAININGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(STAMP)
	$(VENV)/bin/mypy

# The site of docs/, into site/; a warning is an error. NO_MKDOCS_2_WARNING: no advertisement of a successor.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# The pages of docs/ that follow from the code.
reference: $(STAMP)
	$(PY) tools/reference_pages.py

check: lint docs types test

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis site
