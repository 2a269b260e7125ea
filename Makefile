# Everything a fresh machine needs: `make demo` and `make test` build .venv by themselves, and `make test`
# installs the system packages that its tests need, or says how.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
EXTRAS := megatron,deepspeed,plots,cluster,dev
STAMP := $(VENV)/.installed
RELEASES := $(VENV)/.releases

.PHONY: demo demo-deepspeed system-packages test test-slow lint types check clean

system-packages:
	@bash tools/system_packages.sh

$(STAMP): pyproject.toml constraints.txt tools/make_venv.sh
	@bash tools/make_venv.sh $(VENV) "$(EXTRAS)"

$(RELEASES): $(STAMP) tools/releases.txt tools/make_releases.sh
	@bash tools/make_releases.sh $(VENV)

demo: $(STAMP)
	@bash examples/demo/run.sh $(PY)

demo-deepspeed: $(STAMP)
	@bash examples/demo_deepspeed/run.sh $(PY)

# What only computes runs two tests at a time; what starts training processes has the machine to itself.
COMPUTING := $(addprefix tests/,calibration cost mapping model planner protocol report scaling schedule space split study tuner)

test: system-packages $(STAMP) $(RELEASES)
	$(PY) -m pytest -m "not slow" --durations=20 --numprocesses 2 --dist loadfile $(COMPUTING)
	$(PY) -m pytest -m "not slow" --durations=30 $(addprefix --ignore=,$(COMPUTING))

# Half of each slow test is processes that start on one core, so two run side by side.
test-slow: system-packages $(STAMP) $(RELEASES)
	$(PY) -m pytest -m slow --durations=30 --numprocesses 2 --dist worksteal

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(STAMP)
	$(VENV)/bin/mypy

check: lint types test

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
