"""How far Performer is from the softmax attention that it estimates (Choromanski et al. 2021).

Prints the relative error of the output against exact softmax, root mean square over seeds, for
orthogonal and for independent features: it falls like 1 / sqrt(features), and orthogonal features
lie below. q and k are normal times ``--scale``: the variance of the estimate grows like
exp(|q + k|^2), so errors are small only where they are.

    python benchmarks/performer_error.py [--seeds 32 --length 128 --dim 16 --scale 0.25]
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import cosformer  # noqa: E402

FEATURES = (16, 32, 64, 128, 256, 512, 1024)


def errors(features, orthogonal, *, seeds, length=128, dim=16, scale=0.25, is_causal=False):
    """Root mean square over the seeds of |performer - softmax| / |softmax|, for each number."""
    torch.manual_seed(0)
    q, k = (scale * torch.randn(1, length, 1, dim, dtype=torch.float64) for _ in range(2))
    v = torch.randn(1, length, 1, dim, dtype=torch.float64)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=is_causal)
    exact = exact.transpose(1, 2)
    found = []
    for number in features:
        squares = 0.0
        for seed in range(seeds):
            w = cosformer.performer_projection(number, dim, orthogonal=orthogonal, seed=seed)
            out = cosformer.performer_attention(q, k, v, w.double(), is_causal=is_causal)
            squares += ((out - exact).norm() / exact.norm()).item() ** 2
        found.append(math.sqrt(squares / seeds))
    return found


def slope(features, values):
    """Of log(value) against log(features), by least squares: -1/2 for 1 / sqrt(features)."""
    x = torch.tensor(features, dtype=torch.float64).log()
    y = torch.tensor(values, dtype=torch.float64).log()
    x = x - x.mean()
    return ((x * y).sum() / (x * x).sum()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--scale", type=float, default=0.25)
    options = vars(parser.parse_args())
    print(f"relative error against softmax, {options}")
    print(f"{'features':>8} {'orthogonal':>11} {'independent':>11} {'ratio':>6}")
    orthogonal = errors(FEATURES, True, **options)
    independent = errors(FEATURES, False, **options)
    for number, a, b in zip(FEATURES, orthogonal, independent, strict=True):
        print(f"{number:>8} {a:>11.4f} {b:>11.4f} {a / b:>6.3f}")
    print(
        f"slope of the logarithms: {slope(FEATURES, orthogonal):.3f} (orthogonal), "
        f"{slope(FEATURES, independent):.3f} (independent)"
    )


if __name__ == "__main__":
    main()
