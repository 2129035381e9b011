# make demo                run all five stages on real text; the exported model then writes text
# make demo-chat           run stages 02 to 05 on conversations; the exported model then answers
# make test                test what must not break make test-slow   run the other tests
# make test-cloud          run the tests of launch/cloud/: Kubernetes, AWS, images, HyperPod
# make test-long           test small clusters, all damage, more variants (as root, an hour)
# make test-faults         kill stages 200 times and check that nothing is lost (5 minutes)
# make gpu-kit             create gpu_kit/, for a GPU machine without a network (1 minute, 33 MB)
# make test-gpu            run the tests that need a GPU (without one: tiny sizes on the CPU)
# make bench-gpu           measure speed on a GPU (test-gpu and bench-gpu: 40 minutes together)
# make lint                check style, format and types with ruff and mypy
# make reference           write the generated pages of docs/reference/
# make wording             write tests/approved/, the texts that the code prints
# make memory-table        print the memory per GPU of known models, as in docs/how-to/speed.md
# make bench               run the benchmarks that take minutes one after the other (almost an hour)
# make validate-framework  check Python, packages, imports, the offline guard, a sharded step
# make validate-setup      check this machine and all prepared artifacts; with LAUNCHER=slurm or
#                          kubernetes, check the cluster and the artifacts beside its runs
# make test-quick          run all stages, raw text to export, in about a minute, with LAUNCHER; on
#                          Kubernetes all data stay on the volume, and the export is copied here
# make run                 train: EXP, DATASET, MODEL, ARGS, with LAUNCHER
# make status              show the state of that run       make logs-follow   follow its log
# make stop                save and end that run; make run resumes it
#
# EXP=exp DATASET=hf_datasets/corpus MODEL=org/name   the run (default: the only prepared model)
# ARGS='--max-steps 1000'    more options of stage 04
# LAUNCHER=local             launch/single_node.sh on this machine; NPROC=8 sets its processes
# LAUNCHER=slurm             launch/slurm.sbatch; NODES=4, and SBATCH='--partition=gpu' for sbatch
# LAUNCHER=kubernetes        launch/kubernetes.py; NODES, KIND=trainjob, INSTANCE_TYPE=p5.48xlarge,
#                            and KUBERNETES='--image … --pvc …' for its options
# KILLS=200 SEED=7           for test-faults (default: a new seed each time, which is printed)
# VENV=DIR puts the environment in another directory; PYTHON=python3.12 creates it with another
# interpreter. If there is a wheelhouse/ beside this file, as in an air-gap bundle, packages come
# from there, and no network is needed.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python

LAUNCHER ?= local
EXP ?= exp
DATASET ?= hf_datasets/corpus
NODES ?= 1
KILLS ?= 200
KIND ?= pytorchjob

# Text that exists on every machine with Python: the source code of the standard library.
STDLIB = $$($(PY) -c "import sysconfig; print(sysconfig.get_paths()['stdlib'])")
PIP_FROM := $(if $(wildcard wheelhouse),--no-index --find-links wheelhouse)
# A bundle for an old driver contains another build of torch, and its own list of versions.
PINS := $(firstword $(wildcard wheelhouse/requirements.txt) requirements.txt)

# The Python of targets that create no environment: that of .venv, or else the one of the image.
ANY_PY := $(if $(wildcard $(PY)),$(PY),$(PYTHON))
# EXP is the name or the directory of a run, like -e of stage 04.
RUN = $(if $(findstring /,$(EXP)),$(EXP:%/=%),outputs/$(EXP))
NAME = $(notdir $(RUN))
TRAIN = -e $(EXP) -d $(DATASET) $(if $(MODEL),-m $(MODEL)) $(ARGS)
LOCAL = PYTHON=$(ANY_PY) launch/single_node.sh $(if $(NPROC),--nproc-per-node $(NPROC))
# A container has a Python of its own.
SLURM = $(if $(CONTAINER_IMAGE),,PYTHON=$(ANY_PY) )sbatch -N $(NODES) --job-name $(NAME) $(SBATCH)
POD = $(ANY_PY) launch/kubernetes.py
POD_JOB = --kind $(KIND) --job-name $(NAME) --nodes $(NODES) \
  $(if $(INSTANCE_TYPE),--instance-type $(INSTANCE_TYPE)) $(KUBERNETES)
# A pod beside the data; GPUs are for the job.
POD_HERE = --job-name $(NAME) $(KUBERNETES) --gpus-per-node 0

# Tests start many processes, which would compile all modules again if they could not store them.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PY) -m pytest

# The demo runs one rank per GPU, or two ranks on a CPU.
DEMO_RANKS = $(addprefix --nproc-per-node ,$(or $(NPROC),$(if $(shell nvidia-smi -L 2>/dev/null | grep ^GPU),,2)))

define CHECK_local
$(ANY_PY) launch/check.py machine
$(ANY_PY) launch/check.py setup
endef
define CHECK_slurm
$(ANY_PY) launch/check.py slurm --nodes $(NODES) -- $(SBATCH)
$(ANY_PY) launch/check.py setup
endef
define CHECK_kubernetes
$(POD) validate $(POD_JOB)
$(POD) run $(POD_HERE) -- python launch/check.py setup
endef

START_local = $(LOCAL) -- $(TRAIN)
START_slurm = $(SLURM) launch/slurm.sbatch $(TRAIN)
START_kubernetes = $(POD) apply $(POD_JOB) -- $(TRAIN)
# Like START, but wait for the end of the run and return its exit code.
FINISH_local = $(START_local)
FINISH_slurm = job=$$($(SLURM) --wait --parsable launch/slurm.sbatch $(TRAIN)); code=$$?; \
  [ $$code = 0 ] || [ -z "$$job" ] || tail -n 30 "slurm-$${job%%;*}.out"; exit $$code
FINISH_kubernetes = $(POD) deploy $(POD_JOB) -- $(TRAIN)
# Commands of test-quick beside the data: here, or in a pod with the volume.
CLEAN_kubernetes = $(POD) run $(POD_HERE) -- rm -rf splits_test-quick outputs/test-quick
PREPARE_local = $(PY) launch/cloud/prepare.py --quick -- $(TRAIN)
PREPARE_slurm = $(PREPARE_local)
PREPARE_kubernetes = $(POD) prepare --quick $(POD_JOB) -- $(TRAIN)
BESIDE_local = $(PY)
BESIDE_slurm = $(PY)
BESIDE_kubernetes = $(POD) run $(POD_HERE) -- python
FETCH_kubernetes = $(POD) fetch outputs/test-quick/export/final outputs/test-quick/export/final $(POD_HERE)

STATUS_local = $(ANY_PY) launch/monitor.py $(RUN) --once
STATUS_slurm = squeue --me --name=$(NAME) && $(STATUS_local)
STATUS_kubernetes = $(POD) status $(POD_JOB)
LOGS_local = $(ANY_PY) launch/monitor.py $(RUN) --log
LOGS_slurm = $(LOGS_local)
LOGS_kubernetes = $(POD) logs $(POD_JOB) --follow on
STOP_local = $(ANY_PY) launch/stop.py $(RUN)
STOP_slurm = $(STOP_local) --slurm
STOP_kubernetes = $(POD) stop $(POD_JOB)

ifeq ($(filter $(LAUNCHER),local slurm kubernetes),)
$(error LAUNCHER is local, slurm or kubernetes, not "$(LAUNCHER)")
endif

# `make` without a target prints the comments at the head of this file.
.DEFAULT_GOAL := help
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

.PHONY: help demo demo-chat test test-slow test-cloud test-long test-faults lint reference wording memory-table bench gpu-kit test-gpu bench-gpu \
  validate-framework validate-setup test-quick run status logs-follow stop

$(VENV)/installed: $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' || \
	  { for minor in 12 13 14 11 10; do other=python3.$$minor; \
	      $$other -c '' 2>/dev/null && break || other="python3.12 (once it is installed)"; done; \
	    echo "error: Python 3.10 to 3.14 is needed, and $(PYTHON) is not one of them"; \
	    echo "  run: make $(MAKECMDGOALS) PYTHON=$$other"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_FROM) -r $(PINS)
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_FROM) -r requirements-dev.txt
	@touch $@

# A small model learns the style of these packages in two minutes.
demo: $(VENV)/installed
	$(PY) 01_organize_data.py --src-dir "$(STDLIB)" --dst-root splits_demo --num-dirs 4 \
	  --include 'asyncio/*.py' --include 'concurrent/*.py' --include 'json/*.py' \
	  --include 'logging/*.py' --include 'unittest/*.py' --exclude test --exclude site-packages \
	  --mode copy
	$(PY) 02_build_hf_dataset.py --data-folder splits_demo --save-dir hf_datasets/demo \
	  --validation-percent 4
	$(PY) 03_download_model.py --from-scratch --model-size 1M --model-name demo \
	  --train-tokenizer hf_datasets/demo
	PYTHON=$(PY) launch/single_node.sh $(DEMO_RANKS) -- -e demo -d hf_datasets/demo -m demo \
	  --seq-length 128 --batch-size 4 --max-steps 700 --optimizer muon --lr 5e-3 --warmup-steps 100 \
	  --log-freq 50 --ckpt-freq 350 --eval-freq 350 --eval-batches 16
	$(PY) 05_export_checkpoint.py -e demo --out outputs/demo/export/final
	@$(PY) -m lib.generate outputs/demo/export/final --temperature 0.6 --top-p 0.8 \
	  --max-new-tokens 60 -p '    def __init__(self, loop' -p '        if self._'
	@echo; echo "what the run did: outputs/demo/report.html, for any browser; your own data: README.md"

# Questions about functions of Python, with answers from docstrings; a small model memorises them.
demo-chat: $(VENV)/installed
	$(PY) tests/demo/conversations.py raw_demo_chat
	$(PY) 02_build_hf_dataset.py --data-folder raw_demo_chat --save-dir hf_datasets/demo-chat \
	  --format chat
	$(PY) 03_download_model.py --from-scratch --model-size 1M --model-name demo-chat \
	  --train-tokenizer hf_datasets/demo-chat
	$(PY) 04_train_fsdp.py -e demo-chat -d hf_datasets/demo-chat -m demo-chat --seq-length 256 \
	  --prepare-only
	PYTHON=$(PY) launch/single_node.sh $(DEMO_RANKS) -- -e demo-chat -d hf_datasets/demo-chat \
	  -m demo-chat --seq-length 256 --batch-size 4 --max-steps 350 --lr 1e-2 --warmup-steps 30 \
	  --log-freq 50 --ckpt-freq 350
	$(PY) 05_export_checkpoint.py -e demo-chat --out outputs/demo-chat/export/final
	@$(PY) -m lib.generate outputs/demo-chat/export/final \
	  -p 'What does shutil.copyfile do?' -p 'What does math.sqrt do?'

test: $(VENV)/installed-dev
	$(PYTEST) -q -n 4 --dist worksteal -m 'not slow and not long and not gpu' --ignore tests/cloud

test-long: $(VENV)/installed-dev
	$(PYTEST) -m long -rs

test-slow: $(VENV)/installed-dev
	$(PYTEST) -q -n 4 --dist worksteal -m 'slow and not long and not gpu' --ignore tests/cloud

test-cloud: $(VENV)/installed-dev
	$(PYTEST) -q -n 4 --dist worksteal -m 'not long' tests/cloud

test-faults: $(VENV)/installed-dev
	$(PY) -m tests.random_kills --kills $(KILLS) $(if $(SEED),--seed $(SEED))

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

reference: $(VENV)/installed-dev
	$(PY) -m tests.reference --write

wording: $(VENV)/installed-dev
	$(PY) -m tests.wording --write

memory-table: $(VENV)/installed-dev
	$(PY) benchmarks/memory.py $(ARGS)

bench: $(VENV)/installed-dev
	@for script in $(filter-out benchmarks/gpu.py benchmarks/from_scratch.py,$(wildcard benchmarks/*.py)); do \
	  echo "$(PY) $$script"; $(PY) $$script || exit 1; done

gpu-kit: $(VENV)/installed-dev
	$(PY) -m tests.gpu.kit

# These targets use the installed packages, such as those of an image, not the pinned versions.
test-gpu:
	$(ANY_PY) benchmarks/gpu.py correctness

bench-gpu:
	$(ANY_PY) benchmarks/gpu.py mfu rest

validate-framework:
	$(ANY_PY) launch/check.py framework

validate-setup:
	$(CHECK_$(LAUNCHER))

# test-quick writes only to directories named test-quick, and first deletes its earlier results.
test-quick: override EXP = test-quick
test-quick: override DATASET = hf_datasets/test-quick
test-quick: override MODEL = test-quick
test-quick: override ARGS = --seq-length 64 --max-steps 20 --lr 3e-3 --ckpt-freq 10 --log-freq 5
test-quick: $(if $(filter kubernetes,$(LAUNCHER)),,$(VENV)/installed)
	rm -rf splits_test-quick outputs/test-quick
	$(CLEAN_$(LAUNCHER))
	$(PREPARE_$(LAUNCHER))
	$(FINISH_$(LAUNCHER))
	$(BESIDE_$(LAUNCHER)) launch/monitor.py outputs/test-quick --once
	$(BESIDE_$(LAUNCHER)) 05_export_checkpoint.py -e test-quick --out outputs/test-quick/export/final
	$(FETCH_$(LAUNCHER))
	@echo "test-quick: raw text to an exported model with LAUNCHER=$(LAUNCHER)"

run:
	$(START_$(LAUNCHER))

status:
	@$(STATUS_$(LAUNCHER))

logs-follow:
	@$(LOGS_$(LAUNCHER))

stop:
	@$(STOP_$(LAUNCHER))
