# The course's commands. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# A built notebook and its check are those of a machine without a GPU, a network and a compiler: of bitsandbytes' fallbacks
# for a CPU torch.compile makes C++ and has it compiled, seconds for each shape, and imports all that it needs for it.
QUIET_MACHINE := CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 PYTHONHASHSEED=0 TORCHDYNAMO_DISABLE=1
# Two processes of two threads each on two cores take four times as long for small products as two of one. Three tests at
# a time, since two, which often wait for their kernel or browser, left a third of two cores idle.
ONE_THREAD := OMP_NUM_THREADS=1
# Container images set it to stay small. Hundreds of processes start here, and each would compile 1,200 modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help course test test-files stress another-cpu fuzz interrupts check format notebooks stamp figures site bench truth measure-gpu accuracy \
	lock wheel environment

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The reader works in a copy of his own, two folders deep as the notebooks are, so that they reach ../../image from
# there; the server's root is the repository. Of a notebook that is not trusted JupyterLab shows no stored picture before
# its cells have run.
course: $(READY)  ## set everything up, open the course in JupyterLab, in a copy that is yours (my/ko)
	@$(BIN)/python tools/readers_copy.py
	@$(BIN)/python -m jupyter trust --log-level=WARN $(patsubst notebooks/%,my/%,$(wildcard notebooks/ko/*.ipynb)) >/dev/null
	@echo "Starting JupyterLab with my/ko/00_start_here.ipynb (Ctrl+C twice ends it)."
	@exec $(BIN)/python -m jupyterlab --log-level=WARN \
		--ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/my/ko/00_start_here.ipynb \
		--LabApp.app_settings_dir="$(CURDIR)/tools/jupyterlab" --LabApp.news_url=None \
		$(if $(filter 0,$(shell id -u)),--allow-root)

test: $(READY)  ## set everything up, run every check (several minutes)
	@echo "Checking style and notebooks (seconds), then running every test and every notebook (several minutes)."
	@$(MAKE) --no-print-directory check
	@$(QUIET_MACHINE) $(ONE_THREAD) $(BIN)/python -m pytest tests $(wildcard notebooks/ko) -q -n 3 --dist loadfile \
		--no-loadscope-reorder --durations=20 --nbval --nbval-current-env --nbval-cell-timeout 300

test-files: $(READY)  ## the tests or notebooks of FILES="…" alone, one after another
	@$(QUIET_MACHINE) $(ONE_THREAD) $(BIN)/python -m pytest $(FILES) -q --nbval --nbval-current-env --nbval-cell-timeout 300

stress: $(READY)  ## what make test leaves out: every combination and architecture, panels and notebooks treated badly (half an hour and more)
	@$(QUIET_MACHINE) $(ONE_THREAD) $(BIN)/python -m pytest tests -q -m stress -n 2

# Sums in another order: what a notebook shows may not hang on the last bits of a float (or its cell is not compared).
another-cpu: $(READY)  ## every notebook with the instructions of an older CPU: the outputs stay the same
	@ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE \
		$(MAKE) --no-print-directory test-files FILES="$(or $(FILES),notebooks/ko)"

fuzz: $(READY)  ## odd inputs to every public function and command (INPUTS=5000, about half an hour; SEED=0)
	@$(QUIET_MACHINE) $(ONE_THREAD) $(BIN)/python tests/fuzz.py --inputs $(or $(INPUTS),5000) --seed $(or $(SEED),0)

interrupts: $(READY)  ## Ctrl+C at random moments in every public function (COUNT=1000, about half an hour; SEED=0)
	@$(QUIET_MACHINE) $(ONE_THREAD) $(BIN)/python tests/interrupts.py --count $(or $(COUNT),1000) --seed $(or $(SEED),0)

check: $(READY)  ## style, and: is every notebook what its source builds?
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python tools/notebooks.py check
	@$(BIN)/python tools/chapters.py --check

format: $(READY)  ## let ruff put the code in order
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

notebooks: $(READY)  ## build notebooks/ko from notebooks/src (NAME=03_memory_decomposition: that one only)
	@$(BIN)/python tools/notebooks.py build $(NAME)
	@$(BIN)/python tools/chapters.py

stamp: $(READY)  ## put the address of pyproject.toml (badge, set-up cell, pictures) into every notebook
	@$(BIN)/python tools/notebooks.py stamp

figures: $(READY)  ## draw the figures of image/
	@$(BIN)/python -m helpers.figures

site: $(READY)  ## the notebooks as a website in tmp/site (needs requirements-site.txt)
	@$(or $(SITE_PYTHON),$(BIN)/python) tools/site.py

bench: $(READY)  ## the virtual GPU beside its peers, then beside the book (builds a second environment; minutes)
	@$(BIN)/python benchmarks/speed.py
	@$(BIN)/python benchmarks/book.py

# Rows that are off are no failure; a program that breaks is.
truth: $(READY)  ## what others measured on their cards beside what is predicted, README's table and picture (many minutes)
	@$(QUIET_MACHINE) $(ONE_THREAD) $(BIN)/python benchmarks/truth.py --json benchmarks/judged.json
	@$(BIN)/python tools/accuracy.py
	@$(BIN)/python benchmarks/picture.py
	@$(BIN)/python tools/errors.py

# Not the environment's Python but the machine's own: a CUDA image brings its torch with it.
measure-gpu:  ## on a machine with a CUDA GPU: measured beside predicted (PYTHON=... picks the Python)
	PYTHONPATH=. $(PYTHON) benchmarks/measure_gpu.py

accuracy: $(READY)  ## the accuracy table of the README pages, from benchmarks/judged.json and benchmarks/records
	@$(BIN)/python tools/accuracy.py

lock:  ## constraints.txt anew: the newest versions of what requirements.txt brings with it
	@tools/lock.sh

wheel:  ## build the wheel, install it into an empty environment, run a program there (minutes)
	@PYTHON=$(PYTHON) tools/wheel.sh

environment: $(READY)  ## only set everything up

$(READY): requirements.txt constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "The course needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)."; \
		echo "Name another one: make $(or $(firstword $(MAKECMDGOALS)),course) PYTHON=python3.12"; exit 1; }
	@echo "Setting up the course in $(VENV), once: about 2 minutes where torch comes as its CPU build (200 MB)."
	@echo "On Linux, torch by default brings its CUDA libraries, several GB: then the download decides."
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
			echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it needs the package python3-venv."; exit 1; }; fi
	@# Of 15,000 modules the course imports a fourth: each is compiled when it is imported for the first time.
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile -r requirements.txt
	@touch $@
