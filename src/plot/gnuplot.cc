#include "plot/gnuplot.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>

namespace cosformer::plot {

// Single quotes: within double ones gnuplot runs `commands`.
std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'') out += '\'';
    if (c != '\n') out += c;
  }
  return out + "'";
}

std::string gnuplot_header(int width, int height, int font_size,
                           const std::string& output) {
  return str_cat("set terminal pngcairo size ", width, ",", height,
                 " font 'DejaVu Sans,", font_size,
                 "' background rgb 'white'\nset output ", quoted(output),
                 "\nset border 3 lc rgb '#555555' lw 1.5\n"
                 "set tics nomirror out scale 0.6 tc rgb '#333333'\n");
}

Status draw_with_gnuplot(
    const std::string& png_path, const std::string& again,
    const std::function<std::string(const std::string& output)>& script_for) {
  const std::string temporary = png_path + ".tmp";
  const std::string script = script_for(temporary);
  // Where it cannot write its output it would fall back to stdout.
  FILE* gnuplot = ::popen("exec gnuplot >/dev/null 2>&1", "w");
  if (gnuplot == nullptr) {
    return io_error("gnuplot: cannot start: ", strerror(errno));
  }
  // A gnuplot that is not there closes the pipe: an error, not a signal.
  struct sigaction ignore{}, before{};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &before);
  (void)std::fwrite(script.data(), 1, script.size(), gnuplot);
  const int status = ::pclose(gnuplot);
  ::sigaction(SIGPIPE, &before, nullptr);
  std::error_code error;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
    return not_found(
        "gnuplot: not found, so there is no plot: install gnuplot (Debian: "
        "gnuplot-nox) and run ",
        again);
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 ||
      std::filesystem::file_size(temporary, error) == 0 || error) {
    std::filesystem::remove(temporary, error);
    return io_error("gnuplot: failed on ", png_path,
                    ": it needs the pngcairo terminal and a folder that it "
                    "may write to");
  }
  std::filesystem::rename(temporary, png_path, error);
  if (error) {
    return io_error(png_path, ": cannot write: ", error.message());
  }
  return {};
}

}  // namespace cosformer::plot
