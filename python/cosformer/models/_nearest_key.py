"""Which known name a misspelt one was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable

# A key from a hostile file may be of any length; none that long is near.
_LONGEST = 128


def _folded(key: str) -> str:
    """Case, and - for _, are not what a person got wrong."""
    return key.replace("-", "_").lower()


def _edit_distance(a: str, b: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours (Damerau 1964)."""
    before: list[int] = []
    above = list(range(len(b) + 1))
    for i in range(1, len(a) + 1):
        row = [i]
        for j in range(1, len(b) + 1):
            replace = above[j - 1] + (a[i - 1] != b[j - 1])
            row.append(min(above[j] + 1, row[j - 1] + 1, replace))
            if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
                row[j] = min(row[j], before[j - 2] + 1)
        before, above = above, row
    return above[len(b)]


def _is_word_of(word: str, key: str) -> bool:
    """ "layers" in "num_layers": a whole word of the longer key."""
    if len(word) < 3:
        return False
    at = key.find(word)
    if at < 0:
        return False
    end = at + len(word)
    return (at == 0 or key[at - 1] == "_") and (end == len(key) or key[end] == "_")


def nearest_key(key: str, known: Iterable[str]) -> str:
    """The name in ``known`` nearest to ``key`` by edit distance, or "" when none is near.

    The rules are those of ``nearest_key`` in the C++ library, so that both give the same hint.

    >>> nearest_key("emed_dim", ["embed_dim", "num_layers"])
    'embed_dim'
    >>> nearest_key("layers", ["embed_dim", "num_layers"])
    'num_layers'
    """
    if not key or len(key.encode("utf-8", "surrogatepass")) > _LONGEST:
        return ""
    wanted = _folded(key)
    best, best_distance = "", 0
    for candidate in known:
        name = _folded(candidate)
        distance = _edit_distance(wanted, name)
        longest = max(len(wanted), len(name))
        # A third of the letters may be wrong, or two in a short key.
        near = (distance <= max(2, longest // 3) and distance < longest) or (
            _is_word_of(wanted, name) or _is_word_of(name, wanted)
        )
        if near and (not best or distance < best_distance):
            best, best_distance = candidate, distance
    return best
