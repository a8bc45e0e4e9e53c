"""The definition of softmax attention, weight by weight, and calls to try it on."""

import math

import torch


def visible(
    batch,
    heads,
    q_len,
    kv_len,
    *,
    is_causal=False,
    window=None,
    dilation=1,
    global_mask=None,
    block_mask=None,
    block_size=None,
    q_start=0,
    kv_start=0,
    key_mask=None,
    query_mask=None,
):
    """bool [batch, heads, q_len, kv_len], pair by pair from the words of the design."""
    starts = [torch.as_tensor(s).expand(batch).tolist() for s in (q_start, kv_start)]
    result = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool)
    # Lists: their elements are read one by one.
    global_mask, block_mask, key_mask, query_mask = (
        mask if mask is None else mask.tolist()
        for mask in (global_mask, block_mask, key_mask, query_mask)
    )

    def is_global(b, position):
        j = position - starts[1][b]
        return global_mask is not None and 0 <= j < kv_len and global_mask[b][j]

    def in_window(distance):
        if window is None or distance % dilation != 0:
            return False
        t = distance // dilation
        left, right = window
        return (left == -1 or t >= -left) and (right == -1 or t <= right)

    def in_blocks(h, p, r):
        if block_mask is None:
            return False
        a, b = p // block_size, r // block_size
        mask = block_mask[0 if len(block_mask) == 1 else h]
        return 0 <= a < len(mask) and 0 <= b < len(mask[0]) and mask[a][b]

    has_pattern = window is not None or global_mask is not None or block_mask is not None
    for b in range(batch):
        for i in range(q_len):
            for j in range(kv_len):
                p, r = starts[0][b] + i, starts[1][b] + j
                if key_mask is not None and not key_mask[b][j]:
                    continue
                if query_mask is not None and not query_mask[b][i]:
                    continue
                if is_causal and r > p:
                    continue
                base = in_window(r - p) or is_global(b, p) or is_global(b, r)
                for h in range(heads):
                    result[b, h, i, j] = not has_pattern or base or in_blocks(h, p, r)
    return result


def definition(q, k, v, *, scale=None, relative_bias=None, kept=None, **options):
    """out_i = sum_j w_ij v_j / sum_j w_ij in double; kept: what dropout multiplies weights with."""
    q, k, v = (t.double() for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    batch, q_len, heads, dim = q.shape
    kv_len = k.shape[1]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or 1 / math.sqrt(dim))
    if relative_bias is not None:
        reach = (relative_bias.shape[1] - 1) // 2
        i = torch.as_tensor(options.get("q_start", 0)).expand(batch)[:, None] + torch.arange(q_len)
        j = torch.as_tensor(options.get("kv_start", 0)).expand(batch)[:, None]
        j = j + torch.arange(kv_len)
        index = (j[:, None, :] - i[:, :, None]).clamp(-reach, reach) + reach
        scores = scores + relative_bias.double()[:, index].transpose(0, 1)
    seen = visible(batch, heads, q_len, kv_len, **options)
    scores = scores.masked_fill(~seen, -math.inf)
    blind = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(~seen, 0)
    if kept is not None:
        weights = weights * kept
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def band(blocks, *, heads=1, seed=5):
    """A block mask with a diagonal, and others at random."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(heads, blocks, blocks, generator=generator) > 0.6
    return mask | torch.eye(blocks, dtype=torch.bool)


def tokens(batch, length, *at):
    mask = torch.zeros(batch, length, dtype=torch.bool)
    mask[:, list(at)] = True
    return mask


def patterns(length, batch=2, heads=2):
    """Every pattern and some of their unions, for self attention of this length."""
    generator = torch.Generator().manual_seed(7)
    some = torch.rand(batch, length, generator=generator) < 0.08
    return {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"window": (5, 3)},
        "window_causal": {"window": (4, -1), "is_causal": True},
        "window_dilated": {"window": (3, 2), "dilation": 3},
        "global": {"global_mask": some},
        "window_global_causal": {"window": (4, 0), "global_mask": some, "is_causal": True},
        "blocks": {"block_mask": band(-(-length // 8), heads=heads), "block_size": 8},
        "all": {
            "window": (2, 2),
            "global_mask": some,
            "block_mask": band(-(-length // 8)),
            "block_size": 8,
            "is_causal": True,
        },
    }


PATTERNS = list(patterns(8))
