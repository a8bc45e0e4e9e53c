// Numbers and tables for people.
#ifndef COSFORMER_SRC_BASE_FORMAT_TEXT_H_
#define COSFORMER_SRC_BASE_FORMAT_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace cosformer {

using TextTable = std::vector<std::vector<std::string>>;
// Columns aligned on their right but the first; two spaces between.
std::string format_table(const TextTable& rows);
// 1234567 -> "1,234,567".
std::string with_commas(int64_t value);
// "1.234", with the digits after the point.
std::string fixed(double value, int digits);
// Three significant digits without an exponent: "0.00123", "12.3", "1,230".
std::string three_digits(double value);
// "512 B", "1.5 KiB", "12.0 MiB", "3.2 GiB".
std::string byte_size(int64_t bytes);

}  // namespace cosformer

#endif  // COSFORMER_SRC_BASE_FORMAT_TEXT_H_
