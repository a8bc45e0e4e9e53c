#include "cli/progress.h"

#include <langinfo.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <clocale>
#include <cstdlib>

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

}  // namespace

Progress::Progress() {
  const char* term = std::getenv("TERM");
  terminal_ = ::isatty(STDERR_FILENO) == 1 &&
              (term == nullptr || std::string(term) != "dumb");
  std::setlocale(LC_CTYPE, "");
  utf8_ = std::string(nl_langinfo(CODESET)) == "UTF-8";
  // What is over before the first line would be due needs none.
  if (!terminal_) last_drawn_ = Clock::now();
}

bool Progress::due() {
  const auto now = Clock::now();
  const double seconds = terminal_ ? kBarSeconds : kLineSeconds;
  if (last_drawn_ &&
      std::chrono::duration<double>(now - *last_drawn_).count() < seconds) {
    return false;
  }
  last_drawn_ = now;
  return true;
}

void Progress::draw(const std::string& line) {
  const std::string text = "\r" + line + "\x1b[K";
  // A terminal that went away is no reason to stop working.
  if (::write(STDERR_FILENO, text.data(), text.size()) < 0) terminal_ = false;
  drawn_ = true;
}

void Progress::clear() {
  if (drawn_) draw("");
  drawn_ = false;
}

void Progress::finish() {
  if (drawn_) note("");
  drawn_ = false;
}

void Progress::message(const std::string& text) {
  clear();
  note(text);
}

std::string Progress::bar(double share, int64_t width) const {
  const auto full = static_cast<int64_t>(
      std::clamp(share, 0.0, 1.0) * static_cast<double>(width) + 0.5);
  std::string out;
  for (int64_t i = 0; i < width; ++i) {
    out += i < full ? (utf8_ ? "\u2501" : "#") : (utf8_ ? "\u2500" : "-");
  }
  return out;
}

void Progress::show(const std::vector<std::string>& parts, double share) {
  const int64_t width = terminal_width() - 1;
  std::string line;
  for (const std::string& part : parts) {
    const std::string next = line.empty() ? part : line + "  " + part;
    if (terminal_ && static_cast<int64_t>(next.size()) > width) break;
    line = next;
  }
  if (!terminal_) return note(line);
  const int64_t room = width - static_cast<int64_t>(line.size()) - 7;
  if (room >= 5) {
    line = bar(share, std::min<int64_t>(room, 30)) + " " +
           fixed(100.0 * share, 0) + "%  " + line;
  }
  draw(line);
}

}  // namespace cosformer::cli
