#!/usr/bin/env bash
# tools/bench.sh BUILD [OPTIONS of `cosformer bench`]: every benchmark of the kernels, with the machine's peak measured in the same run,
# then every kind of attention against torch's own, into runs/bench (where the build has torch).
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
shift
for benchmark in "$build"/benchmarks/bench_*; do
  [[ -x $benchmark && -f $benchmark ]] || continue
  echo "== ${benchmark#"$build"/}"
  "$benchmark"
done
program=$build/cli/cosformer
if "$program" bench --help >/dev/null 2>&1; then
  echo "== cosformer bench"
  "$program" bench --out runs/bench "$@"
fi
