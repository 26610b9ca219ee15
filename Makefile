# Every target sets up what it needs. VENV can point elsewhere; PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without an NVIDIA GPU, pin torch to the release that was tested on a CPU.
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1 || echo "-c constraints/cpu.txt")
DEMO ?= demo

.PHONY: setup demo test test-slow check format bench figures clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[run,dev]'
	touch $@

demo: setup
	rm -rf $(DEMO) && mkdir -p $(DEMO)
	cd $(DEMO) && PATH="$(abspath $(BIN)):$$PATH" && stagebreaker-profile && stagebreaker-plan && stagebreaker-run

test: setup
	$(BIN)/python -m pytest -q

test-slow: setup
	$(BIN)/python -m pytest -q -m slow

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python benchmarks/planner.py --out benchmarks/results
	$(BIN)/python benchmarks/kernels.py --out benchmarks/results

figures: setup
	$(BIN)/stagebreaker-plan --workload dancegrpo-vrt --set candidates=24 --set group_size=12 --out build/figures
	cp build/figures/timeline.png docs/timeline.png
	$(BIN)/stagebreaker-plan reproduce --out docs
	$(BIN)/stagebreaker-plan extrapolate --out docs

clean:
	rm -rf $(VENV) $(DEMO) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
