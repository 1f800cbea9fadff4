#!/usr/bin/env bash
# The test suite as two halves side by side, since most tests keep one core busy.
#   tests/halves.sh PYTHON          run everything
#   tests/halves.sh PYTHON --retry  run what failed once more, with another seed
set -uo pipefail
# A thread that spins while it waits keeps the other half off its core.
export OMP_WAIT_POLICY=passive
python=$1 retry=${2:-}

half() {
    local cache=.pytest_cache/$1
    shift
    "$python" -m pytest -o cache_dir="$cache" "$@" && return
    local code=$?
    [[ $retry == --retry && $code == 1 ]] || return $code
    "$python" -m pytest -o cache_dir="$cache" --last-failed "$@"
}

mkdir -p .pytest_cache
half one tests/cli tests/memory tests/api tests/parity tests/contract >.pytest_cache/one.log 2>&1 &
half two tests/unit tests/exactness tests/fault
two=$?
wait $!
one=$?
cat .pytest_cache/one.log
exit $((one > two ? one : two))
