#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include "cosformer/format.h"

namespace cosformer {
namespace {

// Case, and - for _, are not what a person got wrong.
std::string folded(std::string_view key) {
  std::string out;
  for (const char c : key) {
    out += c == '-'
               ? '_'
               : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return out;
}

// Insertions, deletions, replacements and swaps of neighbours (optimal string
// alignment: Damerau 1964).
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), above(b.size() + 1),
      row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) above[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replace = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, replace});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before.swap(above);
    above.swap(row);
  }
  return above[b.size()];
}

// "layers" in "num_layers": a whole word of the longer key.
bool is_word_of(std::string_view word, std::string_view key) {
  if (word.size() < 3) return false;
  const size_t at = key.find(word);
  if (at == std::string_view::npos) return false;
  const size_t end = at + word.size();
  return (at == 0 || key[at - 1] == '_') &&
         (end == key.size() || key[end] == '_');
}

}  // namespace

std::string nearest_key(std::string_view key,
                        const std::vector<std::string>& known) {
  // A key from a hostile file may be of any length; none that long is near.
  constexpr size_t kLongest = 128;
  if (key.empty() || key.size() > kLongest) return "";
  const std::string wanted = folded(key);
  std::string best;
  size_t best_distance = 0;
  for (const std::string& candidate : known) {
    const std::string name = folded(candidate);
    const size_t distance = edit_distance(wanted, name);
    // A third of the letters may be wrong, or two in a short key.
    const size_t limit =
        std::max<size_t>(2, std::max(wanted.size(), name.size()) / 3);
    const bool near = (distance <= limit &&
                       distance < std::max(wanted.size(), name.size())) ||
                      is_word_of(wanted, name) || is_word_of(name, wanted);
    if (near && (best.empty() || distance < best_distance)) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace cosformer
