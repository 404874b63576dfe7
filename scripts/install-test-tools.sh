# Installs the oracles and clients of the test suite into the virtual environment of $1 (a Python).
# torch first, and a CPU build of it: the plain package of PyPI brings gigabytes of CUDA libraries.
set -e
python="$1"
pip="$python -m pip install --quiet --disable-pip-version-check"
$python -c 'import torch' 2>/dev/null \
    || $pip "torch==2.13.0+cpu" 2>/dev/null \
    || $pip "torch==2.13.0" 2>/dev/null \
    || $pip "torch==2.13.0" --index-url https://download.pytorch.org/whl/cpu \
    || { echo "no CPU build of torch 2.13.0 could be installed" >&2; exit 1; }
$pip --editable ".[test]"
# Clients of others, which bring a hundred packages (lm-eval: pandas, pyarrow, scikit-learn). Last, as an
# index without them costs their own tests, which then say so, and no other.
$pip "litellm>=1.80" "langchain-openai>=1" "lm-eval>=0.4.9" \
    || echo "litellm, langchain-openai and lm-eval could not be installed: their tests are skipped" >&2
