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
# A browser for the tests of the page; where it cannot be had they are skipped, with a word.
if ! command -v chromium >/dev/null 2>&1 && ! command -v google-chrome >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        { apt-get -q update && DEBIAN_FRONTEND=noninteractive timeout 300 \
            apt-get -q install -y --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 \
            || echo "Chromium could not be installed: the tests of the page will be skipped" >&2
    else
        echo "no Chromium (apt-get install chromium): the tests of the page will be skipped" >&2
    fi
fi
