# Each target sets up what it needs: Python >= 3.11 and a package registry are enough.

# That of the images where this machine has it: it is named in one place, the Dockerfile.
SHIPPED := $(shell sed -n 's/^ARG PYTHON_IMAGE=python:\([0-9.]*\).*/\1/p' Dockerfile)
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for one in python$(SHIPPED) python3; do $$one -c "import ensurepip, venv" >/dev/null 2>&1 && echo $$one && break; done)
PYTHON := $(or $(PYTHON),python3)
endif
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo
# Tests start hundreds of processes; without this each would compile our sources anew where the variable is set.
unexport PYTHONDONTWRITEBYTECODE
export TORCH_INDEX
# Files of tests run beside each other, one more than there are cores, as most of them wait a lot; PYTEST_FLAGS="-n 0" runs
# one after the other.
SIDE_BY_SIDE := -n $(shell $(PYTHON) -c "import os; print(min(4, 1 + len(os.sched_getaffinity(0))))") --dist loadfile --no-loadscope-reorder
PURE := tests/operator tests/protocol tests/redaction tests/simulation tests/sidecar/model tests/sidecar/versions tests/sidecar/rehearsal tests/sidecar/control/test_credentials.py

# The images, under the names that chart and examples give them. BUILD_ARGS="NAME=value ..." are arguments of the Dockerfile,
# BUILD_FLAGS whatever else the builder shall be told.
REGISTRY ?= docker.io/library
TAG ?= $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' tiercheck/about.py)
OUT ?= dist
IMAGES := operator sidecar example-trainer
# The first that answers: docker may be here without its engine.
BUILDER ?= $(shell for one in docker podman buildah; do $$one info >/dev/null 2>&1 && echo $$one && break; done)
arguments = $(foreach one,$(BUILD_ARGS) $(and $(PYTHON_IMAGE),PYTHON_IMAGE=$(PYTHON_IMAGE)) $(and $(TORCH_INDEX),TORCH_INDEX=$(TORCH_INDEX)),--build-arg $(one))
each_image = @set -e; test -n "$(BUILDER)" || { echo "neither docker nor podman nor buildah works here" >&2; exit 1; }; \
	for target in $(IMAGES); do name=$(REGISTRY)/tiercheck-$$target:$(TAG); echo "== $$name"; $(1); done

.PHONY: help setup demo test test-extended test-torch coverage fuzz simulate simulate-mutations chaos lint types contracts chart docs wheels bench gpu-acceptance radosgw-test real-cluster-test real-cluster-up real-cluster-down images images-push images-archive images-test clean

help:
	@echo "make demo       a job on a laptop cluster, hit by every size of failure, twice (about 4 minutes)"
	@echo "make test       the test suite (about 17 minutes on 2 cores)"
	@echo "make test-extended  every failure class on the laptop cluster as well, and properties on more examples (about half an hour)"
	@echo "make test-torch VERSION=2.6.0  the trainer's tests on that torch, in an environment of its own (a gigabyte; half an hour)"
	@echo "make coverage   which branches of the pure rooms no test takes; fails below 95 %"
	@echo "make fuzz       random nonsense into everything that reads what others wrote; TIME=seconds, TARGETS=\"seal directive\""
	@echo "make simulate N=1000 SEED=20000000 JOBS=2  the whole in one thread under random faults, from seeds (SEED_TOLD=7 prints what happens in that one)"
	@echo "make simulate-mutations N=10000  that it finds every deliberate bug"
	@echo "make chaos N=500 SEED=0  strikes on real processes of a job that trains on; HOURS=1 bounds it; report in docs/benchmarks/chaos.md"
	@echo "make lint       ruff: format and lint"
	@echo "make types      mypy: strict on the pure parts"
	@echo "make contracts  import-linter: who may import whom"
	@echo "make chart      write anew what the Helm chart has from elsewhere, and its snapshot"
	@echo "make docs       the documentation site, into build/site"
	@echo "make wheels     the wheel with all parts, and that of the library alone; OUT=folder"
	@echo "make images     the three images, with docker, podman or buildah; REGISTRY=, TAG=, PYTHON_IMAGE=, TORCH_INDEX=, BUILD_ARGS="
	@echo "make images-push, make images-archive OUT=folder  to a registry (REGISTRY=), or into files that \`ctr images import\` takes"
	@echo "make images-test  builds the images and starts each as a pod would (needs root and Debian's packages; 5 minutes, later 3)"
	@echo "make radosgw-test  the remote tier against Debian's radosgw (needs root to install it)"
	@echo "make real-cluster-test  every failure on a cluster of real kubelets (needs root and KUBE_BIN; about an hour)"
	@echo "make bench      every benchmark, beside limits and peers, into docs/benchmarks (an hour or more); BENCH_FLAGS=--quick tries it"
	@echo "make gpu-acceptance  what is promised about GPUs, on one GPU, with PYTHON's own torch (under 10 minutes); GPU_FLAGS=\"--cpu --quick\" tries it"

setup: $(READY)

# Everything is pinned by constraints.txt. An unpinned torch may bring gigabytes of CUDA libraries, and on some
# machines the pinned one does: TORCH_INDEX=<URL of an index that has torch for CPUs> keeps them away.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) tools/set_up.py $(VENV) dev
	touch $(READY) $(DEMO_READY)

$(DEMO_READY): pyproject.toml constraints.txt
	$(PYTHON) tools/set_up.py $(VENV) demo
	touch $(DEMO_READY)

demo: $(DEMO_READY)
	$(BIN)/python -m tiercheck_local.demo $(DEMO_FLAGS)

test: $(READY)
	$(BIN)/python -m pytest -m "not extended and not images" $(SIDE_BY_SIDE) $(PYTEST_FLAGS)

test-extended: $(READY)
	TIERCHECK_EXTENDED=1 $(BIN)/python -m pytest -m "not images" $(SIDE_BY_SIDE) $(PYTEST_FLAGS)

# The pinned frameworks want a torch of their time: tests of one that does not start there are skipped, and say so.
test-torch: VERSION := 2.6.0
test-torch: $(READY)
	$(BIN)/python tools/try_torch.py build/torch-$(VERSION) $(VERSION) -m "not extended and not images" $(SIDE_BY_SIDE) tests/trainer tests/integrations $(PYTEST_FLAGS)

# Of the rooms without I/O, as pyproject.toml lists them, by the tests of operator, protocol, redaction and sidecar.
coverage: $(READY)
	rm -rf build/coverage
	$(BIN)/coverage run -m pytest -m "not extended and not images and not cluster" -k "not thousand and not hundred" $(SIDE_BY_SIDE) $(PYTEST_FLAGS) $(PURE)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --show-missing
	$(BIN)/coverage json --quiet -o build/coverage/report.json
	$(BIN)/python -c "import json; of = json.load(open('build/coverage/report.json'))['totals']; \
	part = 100 * of['covered_branches'] / of['num_branches']; print(f'{part:.2f} % of the branches'); raise SystemExit(part < 95)"

# atheris leads by coverage where it is installed; without it the mutations are random.
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz $(or $(TIME),600) $(TARGETS)

N ?= 1000
SEED ?= 20000000
SIMULATION := $(BIN)/python -m tests.simulation

simulate: $(READY)
	$(SIMULATION) $(if $(SEED_TOLD),--tell $(SEED_TOLD),--schedules $(N) --seed $(SEED) --jobs $(or $(JOBS),$(shell nproc)))

simulate-mutations: $(READY)
	$(SIMULATION) --mutations --schedules $(N) --seed $(SEED)

# Ends with the number of broken promises.
chaos: N := 500
chaos: $(READY)
	$(BIN)/python -m tests.chaos --injections $(N) --seed $(SEED) $(and $(HOURS),--hours $(HOURS)) --report $(or $(REPORT),docs/benchmarks) $(CHAOS_FLAGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy -p tiercheck -p tiercheck_operator -p tiercheck_sidecar -p tiercheck_cli -p tiercheck_local

contracts: $(READY)
	$(BIN)/lint-imports

chart: $(READY)
	$(BIN)/python charts/generate.py
	UPDATE_SNAPSHOTS=1 $(BIN)/python -m pytest -q tests/chart/test_chart_rendering.py tests/chart/test_chart_hook.py

# Needs nothing of the rest. NO_MKDOCS_2_WARNING silences an advertisement, not a warning about our pages.
docs:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# With pip's own build environment: a registry is all that it needs.
wheels:
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(OUT) . ./packages/trainer

bench: $(READY)
	$(BIN)/python -m benchmarks $(BENCH_FLAGS)

# With the machine's own Python and its CUDA build of torch: that of `make setup` has none.
gpu-acceptance:
	$(PYTHON) -m benchmarks.gpu_acceptance $(GPU_FLAGS)

# A real, persistent S3 server: Debian's radosgw, installed if it is missing (that needs root), on loopback in a temporary folder.
radosgw-test: $(READY)
	command -v radosgw && command -v ceph-mon && command -v ceph-osd || { apt-get update -q && apt-get install -qy --no-install-recommends radosgw ceph-mon ceph-osd; }
	$(BIN)/python tests/sidecar/remote/radosgw.py $(BIN)/python -m pytest tests/sidecar/remote -k radosgw $(PYTEST_FLAGS)

images:
	$(call each_image,BUILDAH_LAYERS=true $(BUILDER) build $(BUILD_FLAGS) $(arguments) --target $$target --tag $$name .)

images-push:
	$(call each_image,$(BUILDER) push $$name)

images-archive:
	@mkdir -p $(OUT)
	$(call each_image,file=$(OUT)/$$target.tar; rm -f $$file; $(if $(filter docker,$(notdir $(firstword $(BUILDER)))),$(BUILDER) save --output $$file $$name,$(BUILDER) push --quiet $$name docker-archive:$$file:$$name))

# In namespaces of their own, so that no mount and no process outlives them. What is built is kept in .images for the next time.
images-test: $(READY)
	command -v buildah && command -v debootstrap && command -v runc || { apt-get update -q && apt-get install -qy --no-install-recommends buildah debootstrap runc; }
	unshare --mount --pid --fork --kill-child --mount-proc $(BIN)/python -m pytest tests/images -m images -n 0 --verbose --durations 5 $(PYTEST_FLAGS)

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
	rm -rf $(VENV) .bench .images build/site demo-report .pytest_cache .mypy_cache .ruff_cache .hypothesis
