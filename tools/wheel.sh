#!/usr/bin/env bash
# The wheel as a stranger gets it: built, installed into an empty environment, used from a folder that is not this one.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git clone --quiet . "$scratch/sources"  # what is committed, and a build leaves its folders beside its sources
"${PYTHON:-python3}" -m venv "$scratch/environment"
bin="$scratch/environment/bin"
"$bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$scratch" "$scratch/sources"
"$bin/python" -m pip install --quiet --disable-pip-version-check "$scratch"/virtual_gpu-*.whl

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
"$bin/virtual-gpu" --version
"$bin/python" -c 'import virtual_gpu; print(virtual_gpu.__file__)' | grep -q "$scratch/environment"
# torch and numpy alone: a program of plain PyTorch runs, and a model by name says what to install.
"$bin/virtual-gpu" run --gpu T4 train.py
"$bin/virtual-gpu" doctor - <<< "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 470.00 MiB. GPU 0 has a total capacity of 14.74 GiB of which 439.06 MiB is free." || [ $? = 1 ]
status=0
"$bin/virtual-gpu" fit --model gpt2 --gpu T4 || status=$?
[ "$status" = 2 ] || { echo "fit without transformers: exit status $status, not 2"; exit 1; }
"$bin/python" -m pip install --quiet --disable-pip-version-check "virtual-gpu[models] @ file://$(echo "$scratch"/virtual_gpu-*.whl)"
"$bin/virtual-gpu" fit --model gpt2 --gpu T4 --batch 8 > plans.txt
head -n 5 plans.txt
"$bin/virtual-gpu" --version
