#include "base/format_text.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>
#include <string_view>

namespace cosformer {
namespace {

size_t columns_of(std::string_view text) {
  size_t columns = 0;
  for (const char c : text) columns += (c & 0xC0) != 0x80;
  return columns;
}

}  // namespace

std::string format_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t c = 0; c < row.size(); ++c) {
      widths[c] = std::max(widths[c], columns_of(row[c]));
    }
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string pad(widths[c] - columns_of(row[c]), ' ');
      if (c == 0) {
        line += row[c] + pad;
      } else {
        line.append(2, ' ').append(pad).append(row[c]);
      }
    }
    while (!line.empty() && line.back() == ' ') line.pop_back();
    out += line + "\n";
  }
  return out;
}

std::string with_commas(int64_t value) {
  std::string digits = std::to_string(value);
  const int64_t first = value < 0 ? 1 : 0;
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > first; at -= 3) {
    digits.insert(static_cast<size_t>(at), 1, ',');
  }
  return digits;
}

std::string fixed(double value, int digits) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value;
  return out.str();
}

std::string three_digits(double value) {
  if (!std::isfinite(value) || value == 0) return fixed(value, 0);
  const auto size_of = [](double x) {
    return std::floor(std::log10(std::abs(x)));
  };
  const double unit = std::pow(10.0, size_of(value) - 2);
  const double rounded = std::round(value / unit) * unit;
  // 9.999 has one digit more once it is rounded. 1e-9: of 1,000 that the
  // arithmetic left a little below.
  const double digits = 2 - size_of(rounded * (1 + 1e-9));
  if (digits < 0) return with_commas(std::llround(rounded));
  return fixed(rounded, static_cast<int>(std::min(digits, 12.0)));
}

std::string byte_size(int64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; std::abs(value) >= 1024 && unit + 1 < std::size(units); ++unit) {
    value /= 1024;
  }
  return fixed(value, unit == 0 ? 0 : 1) + " " + units[unit];
}

}  // namespace cosformer
