# Each target sets up what it needs: Python >= 3.11 and a package registry are enough.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Files of tests run beside each other, as most of them wait a lot; PYTEST_FLAGS="-n 0" runs one after the other.
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadfile

.PHONY: help setup demo test test-extended lint types contracts chart bench radosgw-test real-cluster-test real-cluster-up real-cluster-down clean

help:
	@echo "make demo       a job on a laptop cluster, hit by every size of failure (about 3 minutes)"
	@echo "make test       the test suite (under 15 minutes on 2 cores)"
	@echo "make test-extended  every failure class on the laptop cluster as well (about half an hour)"
	@echo "make lint       ruff: format and lint"
	@echo "make types      mypy: strict on the pure parts"
	@echo "make contracts  import-linter: who may import whom"
	@echo "make chart      write anew what the Helm chart has from elsewhere, and its snapshots"
	@echo "make radosgw-test  the remote tier against Debian's radosgw (needs root to install it)"
	@echo "make real-cluster-test  every failure on a cluster of real kubelets (needs root and KUBE_BIN; about an hour)"
	@echo "make bench      every benchmark, beside limits and peers, into docs/benchmarks (about 20 minutes); BENCH_FLAGS=--quick tries it"

setup: $(READY)

# Everything is pinned by constraints.txt, torch included: an unpinned torch may bring gigabytes of CUDA libraries.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "TierCheck needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m tiercheck_local.demo $(DEMO_FLAGS)

test: $(READY)
	$(BIN)/python -m pytest -m "not extended" $(SIDE_BY_SIDE) $(PYTEST_FLAGS)

test-extended: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(PYTEST_FLAGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy -p tiercheck -p tiercheck_operator -p tiercheck_sidecar -p tiercheck_cli -p tiercheck_local

contracts: $(READY)
	$(BIN)/lint-imports

chart: $(READY)
	$(BIN)/python charts/generate.py
	UPDATE_SNAPSHOTS=1 $(BIN)/python -m pytest -q tests/chart/test_chart_rendering.py

bench: $(READY)
	$(BIN)/python -m benchmarks $(BENCH_FLAGS)

# A real, persistent S3 server: Debian's radosgw, installed if it is missing (that needs root), on loopback in a temporary folder.
radosgw-test: $(READY)
	command -v radosgw && command -v ceph-mon && command -v ceph-osd || { apt-get update -q && apt-get install -qy --no-install-recommends radosgw ceph-mon ceph-osd; }
	$(BIN)/python tests/sidecar/remote/radosgw.py $(BIN)/python -m pytest tests/sidecar/remote -k radosgw $(PYTEST_FLAGS)

# A cluster of real kubelets on this machine, up and down again; says so and does nothing where it cannot be. IMAGES is where
# `make images-archive` left the three archives.
REAL_CLUSTER := PYTHONPATH=tests/real_cluster $(BIN)/python -m testbed

real-cluster-test: $(READY)
	$(BIN)/python tests/real_cluster/whole.py $(PYTEST_FLAGS)

real-cluster-up: $(READY)
	$(REAL_CLUSTER) up

real-cluster-down: $(READY)
	$(REAL_CLUSTER) down

clean:
	rm -rf $(VENV) .bench demo-report .pytest_cache .mypy_cache .ruff_cache .hypothesis
