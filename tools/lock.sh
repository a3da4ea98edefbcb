#!/usr/bin/env bash
# constraints.txt anew: what requirements.txt brings with it, at the versions that are newest today (`make lock`).
# torch stands there without its build ("+cpu"): which build comes is the machine's matter.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"${PYTHON:-python3}" -m venv "$environment"
grep -v '^-c ' requirements.txt > "$environment/loose.txt"
sed -i "s#^-e \.#-e $PWD#" "$environment/loose.txt"
quiet=(--disable-pip-version-check)
[ -t 2 ] || quiet+=(--quiet)  # whoever watches sees how far pip is
"$environment/bin/python" -m pip install "${quiet[@]}" -r "$environment/loose.txt" >&2
{
    echo "# What requirements.txt brings with it, and what that brings: one version each, the tested ones. Made by"
    echo "# \`make lock\`; a change of requirements.txt is followed by it."
    "$environment/bin/python" -m pip list --format=freeze --exclude-editable \
        --exclude pip --exclude setuptools | sed 's/+.*//' | grep -v -E '^(nvidia|cuda|triton)'
} > constraints.txt
