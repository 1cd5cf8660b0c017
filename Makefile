# `make demo` answers a question with the bundled model; `make test` runs every test.
# MODEL=DIR and OUT=DIR point the gemma4-* targets at a checkpoint and an output directory.

CARGO ?= cargo
OUT ?= out
MODEL ?= ci/models/tiny-chat-int4
PROMPT ?= What is the capital of France?
BIN := target/release

.PHONY: help build demo validate test torture lint fmt doc check audit bench cuda-toolchain gemma4-cpu gemma4-cuda gpu-bundle dist reproducible clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

build: ## build all commands into target/release
	$(CARGO) build --release --locked --bins

demo: build ## export the bundled model and ask it a question
	@ci/export_model_artifact.sh --prequantized ci/models/tiny-chat-int4 --output-dir $(OUT)/demo
	@ci/test_model_e2e.sh $(OUT)/demo "$(PROMPT)"

validate: build ## take one prompt through every stage of an export of MODEL and compare them
	@$(BIN)/gemma4-validate --prequantized $(MODEL)

test: ## run all tests (installs nothing: Rust, a C compiler and python3 are enough)
	ci/test.sh

torture: build ## let faults happen to the commands; LONG=--long for the long versions
	ci/torture.py --bin $(BIN) $(LONG)

lint: ## formatting, clippy, documentation, dependencies
	ci/lint.sh

audit: ## advisories, licences, duplicates, sources of dependencies (needs the network and cargo-deny)
	$(CARGO) deny --locked check advisories bans licenses sources

fmt: ## format the sources
	$(CARGO) fmt --all

doc: ## build the documentation
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --release --locked --workspace --no-deps

check: lint test ## everything that CI runs

gemma4-cpu: build ## export MODEL (a pre-quantized bundle) and run it on the CPU
	@ci/export_model_artifact.sh --prequantized $(MODEL) --output-dir $(OUT)/gemma4-cpu
	@ci/test_model_e2e.sh $(OUT)/gemma4-cpu "$(PROMPT)" --device cpu

cuda-toolchain: ## install the CUDA compiler from PyPI into .cuda (no GPU or driver needed)
	ci/cuda_toolchain.sh

gemma4-cuda: build cuda-toolchain ## export MODEL (a pre-quantized bundle) for GPUs and run it on one
	@ci/export_model_artifact.sh --prequantized $(MODEL) --backend cuda --output-dir $(OUT)/gemma4-cuda
	@ci/test_model_e2e.sh $(OUT)/gemma4-cuda "$(PROMPT)" --device cuda

gpu-bundle: cuda-toolchain ## pack what ci/gpu_check.sh needs on a machine with a GPU
	$(CARGO) build --release --locked --workspace --bins --examples
	ci/gpu_bundle.sh $(OUT)/gpu-bundle

bench: build ## prefill and decode speed of the bundled model on the CPU
	@ci/export_model_artifact.sh --prequantized $(MODEL) --output-dir $(OUT)/bench
	@$(BIN)/gemma4-bench --model_path $(OUT)/bench/model.pte --data_path $(OUT)/bench/model.ptd \
		--device cpu -p 32,512 -n 128 -r 3

bench-gate: build cuda-toolchain ## 31B's shapes on the GPU: fail on a loss of 5 % against ci/bench_shares.json
	@$(BIN)/gemma4-export --random exporter/configs/gemma-4-31b.json --no-data --recipe default \
		--backend cuda --max-seq-len 8192 --output-dir $(OUT)/bench-gate
	@$(BIN)/gemma4-bench --model_path $(OUT)/bench-gate/model.pte --random-weights 1 --device cuda \
		-p 512,2048 -n 128 -d 0,2048 --rows 4 -r 5 -o json > $(OUT)/bench-gate/results.json
	@ci/bench_gate.py < $(OUT)/bench-gate/results.json

dist: ## pack the commands into an archive under OUT and try it in an empty root
	ci/dist.sh $(OUT)/dist

reproducible: ## build the archive twice, in two directories, and compare the bytes
	ci/reproducible.sh

clean: ## remove what was built and exported
	$(CARGO) clean
	rm -rf $(OUT)
