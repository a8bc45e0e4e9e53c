// Pictures: gnuplot draws, fed through a pipe.
#ifndef COSFORMER_SRC_PLOT_GNUPLOT_H_
#define COSFORMER_SRC_PLOT_GNUPLOT_H_

#include <functional>
#include <string>

#include "cosformer/base.h"

namespace cosformer::plot {

// A string of gnuplot.
std::string quoted(const std::string& text);

// The first lines of every script: a PNG of that size in pixels at `output`,
// and the house's axes.
std::string gnuplot_header(int width, int height, int font_size,
                           const std::string& output);

// Draws what script_for(output) says into png_path: beside its place, then
// renamed, so that an old picture stays until it is replaced. again: the
// command to run once gnuplot is there, for the message that it is not.
Status draw_with_gnuplot(
    const std::string& png_path, const std::string& again,
    const std::function<std::string(const std::string& output)>& script_for);

}  // namespace cosformer::plot

#endif  // COSFORMER_SRC_PLOT_GNUPLOT_H_
