#!/usr/bin/env bash
# The notebooks with Colab's versions of the libraries, in an environment of their own:
#     tools/colab_versions.sh [NAME ...]          e.g. tools/colab_versions.sh 01_data_types 03_memory_decomposition
# COLAB_ENV: where the environment lies (default .bench/colab). TORCH: which torch (default: Colab's version; its
# default build for Linux brings several GB of CUDA, TORCH="torch==2.13.0" takes the one of requirements.txt instead).
set -euo pipefail
cd "$(dirname "$0")/.."
environment=${COLAB_ENV:-.bench/colab}
torch=${TORCH:-torch==2.11.0}
if [ ! -e "$environment/.ready" ]; then
    "${PYTHON:-python3}" -m venv "$environment"
    quiet=(--disable-pip-version-check)
    [ -t 2 ] || quiet+=(--quiet)  # whoever watches sees how far pip is
    "$environment/bin/python" -m pip install "${quiet[@]}" "$torch" -r requirements-colab.txt
    "$environment/bin/python" -m ipykernel install --sys-prefix >/dev/null
    touch "$environment/.ready"
fi
notebooks=()
for name in "$@"; do notebooks+=("notebooks/ko/${name%.ipynb}.ipynb"); done
[ ${#notebooks[@]} -gt 0 ] || notebooks=(notebooks/ko)
"$environment/bin/python" -c 'import IPython, datasets, ipywidgets, torch, transformers
for module in (torch, transformers, datasets, ipywidgets, IPython):
    print(module.__name__, module.__version__)'
# What is asked here: every cell runs. COMPARE=--nbval asks for equal outputs too; then pictures differ by the moments of
# allocation that another transformers has, with the same bytes.
CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 PYTHONHASHSEED=0 PYTHONPATH="$PWD" "$environment/bin/python" -m pytest "${notebooks[@]}" \
    -q -p no:cacheprovider "${COMPARE:---nbval-lax}" --nbval-current-env --nbval-cell-timeout 300
