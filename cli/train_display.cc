#include "cli/train_display.h"

#include <langinfo.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <clocale>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "cli/output.h"

namespace cosformer::cli {
namespace {

constexpr double kBarSeconds = 0.1;   // between drawings of the bar
constexpr double kLineSeconds = 5.0;  // between plain lines

int64_t terminal_width() {
  struct winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    return size.ws_col;
  }
  const char* columns = std::getenv("COLUMNS");
  const int64_t width = columns != nullptr ? std::atoll(columns) : 0;
  return width > 0 ? width : 80;
}

// 940, 12.3k, 1.2M.
std::string rate(double value) {
  if (value < 1e3) return fixed(value, 0);
  if (value < 1e6) return fixed(value / 1e3, value < 1e5 ? 1 : 0) + "k";
  return fixed(value / 1e6, 1) + "M";
}

}  // namespace

TrainDisplay::TrainDisplay() {
  const char* term = std::getenv("TERM");
  terminal_ = ::isatty(STDERR_FILENO) == 1 &&
              (term == nullptr || std::string(term) != "dumb");
  std::setlocale(LC_CTYPE, "");
  utf8_ = std::string(nl_langinfo(CODESET)) == "UTF-8";
  // What is over before the first line would be due needs none.
  if (!terminal_) last_drawn_ = Clock::now();
}

bool TrainDisplay::due(double seconds) {
  const auto now = Clock::now();
  if (last_drawn_ &&
      std::chrono::duration<double>(now - *last_drawn_).count() < seconds) {
    return false;
  }
  last_drawn_ = now;
  return true;
}

void TrainDisplay::draw(const std::string& line) {
  const std::string text = "\r" + line + "\x1b[K";
  // A terminal that went away is no reason to stop training.
  if (::write(STDERR_FILENO, text.data(), text.size()) < 0) terminal_ = false;
  drawn_ = true;
}

void TrainDisplay::clear() {
  if (drawn_) draw("");
  drawn_ = false;
}

void TrainDisplay::finish() {
  if (drawn_) note("");
  drawn_ = false;
}

void TrainDisplay::message(const std::string& text) {
  clear();
  note(text);
}

std::string TrainDisplay::bar(double share, int64_t width) const {
  const auto full = static_cast<int64_t>(
      std::clamp(share, 0.0, 1.0) * static_cast<double>(width) + 0.5);
  std::string out;
  for (int64_t i = 0; i < width; ++i) {
    out += i < full ? (utf8_ ? "\u2501" : "#") : (utf8_ ? "\u2500" : "-");
  }
  return out;
}

void TrainDisplay::draw_parts(const std::vector<std::string>& parts,
                              double share) {
  const int64_t width = terminal_width() - 1;
  std::string line;
  for (const std::string& part : parts) {
    const std::string next = line.empty() ? part : line + "  " + part;
    if (static_cast<int64_t>(next.size()) > width) break;
    line = next;
  }
  const int64_t room = width - static_cast<int64_t>(line.size()) - 7;
  if (room >= 5) {
    line = bar(share, std::min<int64_t>(room, 30)) + " " +
           fixed(100.0 * share, 0) + "%  " + line;
  }
  draw(line);
}

void TrainDisplay::on_data(int64_t done, int64_t total) {
  if (!due(terminal_ ? kBarSeconds : kLineSeconds)) return;
  const double share =
      total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 0.0;
  const std::string text =
      str_cat("reading the text: ", fixed(static_cast<double>(done) / 1e6, 1),
              " of ", fixed(static_cast<double>(total) / 1e6, 1), " MB");
  if (terminal_) {
    draw_parts({text}, share);
  } else {
    note(text);
  }
}

void TrainDisplay::on_step(const TrainProgress& progress) {
  progress_ = progress;
  const bool last = progress.step == progress.steps;
  if (!due(terminal_ ? kBarSeconds : kLineSeconds) && !last) return;
  const double share =
      static_cast<double>(progress.step) /
      static_cast<double>(std::max<int64_t>(progress.steps, 1));
  const std::string steps =
      str_cat("step ", progress.step, "/", progress.steps);
  const std::string loss = "loss " + fixed(progress.loss, 3);
  const std::string validation =
      validation_loss_ ? "val " + fixed(*validation_loss_, 3) : std::string();
  const std::string speed = rate(progress.tokens_per_second) + " tokens/s";
  const std::string left = duration(progress.seconds_left) + " left";
  if (!terminal_) {
    note(str_cat(steps, "  ", loss, validation.empty() ? "" : "  ", validation,
                 "  lr ", progress.lr, "  ", speed, "  ", left));
    return;
  }
  std::vector<std::string> parts = {steps, loss};
  if (!validation.empty()) parts.push_back(validation);
  parts.push_back(left);
  parts.push_back(speed);
  draw_parts(parts, share);
}

void TrainDisplay::on_eval(int64_t step, const EvalResult& result,
                           bool is_best) {
  validation_loss_ = result.loss;
  if (terminal_) {
    if (progress_.step > 0) {
      last_drawn_.reset();
      on_step(progress_);
    }
    return;
  }
  note(str_cat("step ", step, ": validation loss ", fixed(result.loss, 4), ", ",
               fixed(result.bits_per_byte, 4), " bits/byte",
               is_best ? " (best so far)" : ""));
}

}  // namespace cosformer::cli
