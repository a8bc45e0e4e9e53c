// How long work shows itself: a bar on a terminal, plain lines elsewhere; both
// on stderr.
#ifndef COSFORMER_CLI_PROGRESS_H_
#define COSFORMER_CLI_PROGRESS_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cosformer::cli {

class Progress {
 public:
  Progress();

  bool is_terminal() const { return terminal_; }
  // Whether it is time for another drawing of the bar, or for another line.
  bool due();
  // The next drawing is due at once.
  void hurry() { last_drawn_.reset(); }
  // On a terminal, a bar: those parts that it has room for, the first ones
  // before the later. Elsewhere a line of all parts.
  void show(const std::vector<std::string>& parts, double share);
  // A line of its own, above the bar.
  void message(const std::string& text);
  // Ends the bar's line.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  void draw(const std::string& line);
  void clear();
  std::string bar(double share, int64_t width) const;

  bool terminal_ = false;
  bool utf8_ = false;
  bool drawn_ = false;
  std::optional<Clock::time_point> last_drawn_;
};

}  // namespace cosformer::cli

#endif  // COSFORMER_CLI_PROGRESS_H_
