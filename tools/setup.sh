#!/usr/bin/env bash
# Installs what the build needs and is missing: Debian packages (as root or with sudo), and Python packages into build/venv.
# Says what it does; does nothing on a machine that has everything. --torch-free: only what -DCOSFORMER_TORCH=OFF needs.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
torch=1
case "${1:-}" in
  --torch-free) torch=0 ;;
  "") ;;
  *)
    echo "setup: found '$1', expected --torch-free or nothing" >&2
    exit 2
    ;;
esac

say() { echo "setup: $*"; }

# --- Debian packages ---
missing=()
while IFS=$'\t' read -r package part; do
  [[ $package =~ ^(#|$) ]] && continue
  [[ $torch = 0 && $part = torch ]] && continue
  # A tool that came some other way (a newer cmake from pip, say) is as good as its package.
  case $package in
    cmake | make | ccache) command -v "$package" >/dev/null && continue ;;
    ninja-build) command -v ninja >/dev/null && continue ;;
    g++) command -v g++ >/dev/null && continue ;;
    gnuplot-nox) command -v gnuplot >/dev/null && continue ;;
    python3-venv) python3 -c 'import ensurepip, venv' 2>/dev/null && continue ;;
  esac
  dpkg -s "$package" 2>/dev/null | grep -q '^Status: install ok' || missing+=("$package")
done <"$root/tools/packages.txt"

if ((${#missing[@]})); then
  as_root=()
  if [[ $(id -u) != 0 ]]; then
    if ! command -v sudo >/dev/null; then
      say "these packages are missing, and neither root nor sudo is at hand. As root, run:"
      say "  apt-get install ${missing[*]}"
      exit 1
    fi
    as_root=(sudo)
  fi
  say "installing Debian packages: ${missing[*]}"
  log=$(mktemp)
  if ! { "${as_root[@]}" apt-get update && "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    say "apt-get failed; its whole output is in $log"
    exit 1
  fi
  rm -f "$log"
fi
((torch)) || exit 0

# --- Python packages ---
venv=$root/build/venv
pinned=$(sed -n 's/^torch==//p' "$root/tools/requirements.txt")
# The torch of an interpreter, if it is of the pinned release (2.13.x for 2.13.0).
torch_of() {
  "$1" -c "import torch; print(torch.__version__)" 2>/dev/null | grep -E "^${pinned%.*}\\." || true
}

stamp=$venv/.requirements # requirements.txt as it was installed
if ! cmp -s "$root/tools/requirements.txt" "$stamp"; then
  if ! "$venv/bin/python3" -m pip --version >/dev/null 2>&1; then
    options=()
    if [[ -n $(torch_of python3) ]]; then
      options=(--system-site-packages)
      say "using the torch $(torch_of python3) that $(command -v python3) has"
    fi
    say "creating build/venv"
    mkdir -p "$root/build"
    rm -rf "$venv"
    python3 -m venv "${options[@]}" "$venv"
  fi
  wanted=$(mktemp)
  if [[ -n $(torch_of "$venv/bin/python3") ]]; then
    grep -v '^torch==' "$root/tools/requirements.txt" >"$wanted"
  else
    cp "$root/tools/requirements.txt" "$wanted"
  fi
  say "installing Python packages into build/venv (about 1 GB with a CPU build of torch)"
  "$venv/bin/python3" -m pip install -q --disable-pip-version-check -r "$wanted" 2> >(grep -v WARNING >&2)
  rm -f "$wanted"
  # A CUDA build of torch only configures where CUDA's compiler is.
  cuda=$("$venv/bin/python3" -c 'import torch; print(torch.version.cuda or "")')
  if [[ -n $cuda ]] && ! command -v nvcc >/dev/null; then
    say "found a torch built for CUDA $cuda and no nvcc, expected a CPU build of torch: install it with"
    say "  build/venv/bin/pip install --force-reinstall torch==$pinned    (from PyTorch's own index of CPU builds)"
    say "and run this again"
    exit 1
  fi
  cp "$root/tools/requirements.txt" "$stamp"
fi
