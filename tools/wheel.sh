#!/usr/bin/env bash
# The wheel as a stranger gets it: built, installed into an empty environment, used from a folder that is not this one.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git clone --quiet . "$scratch/sources"  # what is committed, and a build leaves its folders beside its sources
"${PYTHON:-python3}" -m venv "$scratch/environment"
bin="$scratch/environment/bin"
quiet=(--disable-pip-version-check)
[ -t 2 ] || quiet+=(--quiet)  # whoever watches sees how far pip is
"$bin/python" -m pip wheel "${quiet[@]}" --no-deps --wheel-dir "$scratch" "$scratch/sources"
"$bin/python" -m zipfile -l "$scratch"/virtual_gpu-*.whl | awk 'NR > 1 {print $1}' | grep -Ev '^virtual_gpu(-[^/]*\.dist-info)?/' &&
    { echo "the wheel holds more than virtual_gpu"; exit 1; }
"$bin/python" -m pip install "${quiet[@]}" "$scratch"/virtual_gpu-*.whl

cat > "$scratch/train.py" <<'PROGRAM'
import torch

layer = torch.nn.Linear(4096, 4096, device="cuda")
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(3):
    layer(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
PROGRAM

cd "$scratch"
export CUDA_VISIBLE_DEVICES=
unset PYTHONPATH
ends_in() {  # STATUS COMMAND…: run it; its status has to be this one
    local wanted=$1 status=0
    shift
    "$@" || status=$?
    [ "$status" = "$wanted" ] || { echo "exit status $status, not $wanted: $*"; exit 1; }
}
"$bin/virtual-gpu" --version
"$bin/python" -c 'import virtual_gpu; print(virtual_gpu.__file__)' | grep -q "$scratch/environment"
ends_in 1 "$bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("helpers") is None)'
"$bin/virtual-gpu" bug-report > report.json
"$bin/python" -c 'import json; print(json.load(open("report.json"))["libraries"])'
ends_in 1 grep -q "$HOME" report.json
# torch and numpy alone: a program of plain PyTorch runs, and a model by name says what to install.
"$bin/virtual-gpu" run --gpu T4 --save once.json --snapshot once.pickle train.py
sed 's/randn(64/randn(8192/' train.py > longer.py
"$bin/virtual-gpu" run --gpu T4 --save longer.json longer.py > /dev/null
ends_in 0 "$bin/virtual-gpu" compare once.json once.pickle
ends_in 1 "$bin/virtual-gpu" compare once.json longer.json --fail-if-peak-grew 2%
ends_in 0 "$bin/virtual-gpu" replay once.pickle
sed 's/randn(64/randn(2**21/' train.py > too_long.py
ends_in 1 "$bin/virtual-gpu" run --no-advise --gpu T4 too_long.py 2> error.txt
ends_in 0 "$bin/virtual-gpu" doctor error.txt
ends_in 2 "$bin/virtual-gpu" fit --model gpt2 --gpu T4
"$bin/python" -m pip install "${quiet[@]}" "virtual-gpu[models,completion] @ file://$(echo "$scratch"/virtual_gpu-*.whl)"
"$bin/virtual-gpu" fit --model gpt2 --gpu T4 --batch 8 --save plan > plans.txt
head -n 5 plans.txt
"$bin/virtual-gpu" completion bash | bash -n
"$bin/virtual-gpu" --version
echo "The wheel works."
