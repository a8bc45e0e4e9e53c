#!/usr/bin/env bash
# tools/bench.sh BUILD: every benchmark of the kernels, with the machine's peak measured in the same run.
set -euo pipefail
cd "$(dirname "$0")/.."
for benchmark in "$1"/benchmarks/bench_*; do
  [[ -x $benchmark && -f $benchmark ]] || continue
  echo "== ${benchmark#"$1"/}"
  "$benchmark" "${@:2}"
done
