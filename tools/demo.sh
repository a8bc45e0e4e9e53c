#!/usr/bin/env bash
# tools/demo.sh PROGRAM [DATA]: trains configs/demo.toml on DATA (default: the C++ standard library's headers), then lets it write.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
program=$root/$1
data=${2:-}

if [[ -z $data ]]; then
  # Where this compiler keeps <vector>.
  vector=$(echo '#include <vector>' | "${CXX:-c++}" -x c++ -M - | tr ' ' '\n' | awk '/\/vector$/ && !n++')
  if [[ -z $vector ]]; then
    echo "demo: found no <vector> through ${CXX:-c++}; give a text file or folder: make demo DATA=path" >&2
    exit 1
  fi
  data=$(dirname "$vector")
fi

# Each demo has a folder of its own; runs/demo points to the latest.
run=$root/runs/demo-$(date +%Y%m%d-%H%M%S)
mkdir -p "$root/runs"
cd "$root"
"$program" train configs/demo.toml --data "$data" --out "$run"
ln -sfn "$(basename "$run")" "$root/runs/demo"

prompt=${PROMPT:-$'template <typename'}
printf '\n--- what it writes after "%s" (temperature 0.7) ---\n' "$prompt"
"$program" generate "$run" --prompt "$prompt" --tokens 400 --temperature 0.7 --seed 1 --rolling
printf '\n---\nplot:   %s\nmodel:  %s\nmore:   %s generate runs/demo --prompt "namespace std"\n' "runs/demo/loss.png" "runs/demo/checkpoints/best" "${program#"$root"/}"
