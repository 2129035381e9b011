# make demo   the five stages on real text, from nothing to generated lines
# make test   the quick tests          make test-slow   the long ones
# make lint   ruff
# VENV=DIR puts the environment elsewhere; PYTHON=python3.12 makes it with another interpreter.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python

# Every machine with Python has this text: the sources of its standard library.
STDLIB = $$($(PY) -c "import sysconfig; print(sysconfig.get_paths()['stdlib'])")

.PHONY: demo test test-slow lint

$(VENV)/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: Python 3.10 or newer is needed; make $(MAKECMDGOALS) PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

demo: $(VENV)/installed
	$(PY) 01_organize_data.py --src-dir "$(STDLIB)" --dst-root splits_demo --num-dirs 20 \
	  --include '*.py' --include '*.txt' --exclude 'site-packages' --exclude 'test' \
	  --exclude 'tests' --exclude 'idlelib' --exclude 'lib2to3' --exclude 'encodings' --mode copy
	$(PY) 02_build_hf_dataset.py --data-folder splits_demo --save-dir hf_datasets/demo \
	  --validation-percent 4
	$(PY) 03_download_model.py --from-scratch --model-size tiny --model-name demo \
	  --train-tokenizer hf_datasets/demo
	$(BIN)/torchrun --nproc-per-node 2 04_train_fsdp.py -e demo -d hf_datasets/demo -m demo \
	  --precision bf16 --seq-length 256 --batch-size 4 --max-steps 300 --lr 3e-3 \
	  --ckpt-freq 100 --eval-freq 100 --eval-batches 16
	$(PY) 05_export_checkpoint.py -e demo --out outputs/demo/export/final
	@$(PY) launch/show_result.py outputs/demo --model outputs/demo/export/final \
	  --prompt 'def __init__(self' --prompt 'import '

test: $(VENV)/installed-dev
	$(PY) -m pytest -q -n 2 --dist worksteal -m 'not slow'

test-slow: $(VENV)/installed-dev
	$(PY) -m pytest -q -n 2 --dist worksteal -m slow

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
