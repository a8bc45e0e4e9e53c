#include "kernels/simd/softmax_decode.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/half.h"
#include "kernels/simd/schedule.h"

namespace cosformer::simd {
namespace {

int64_t floor_div(int64_t a, int64_t b) {
  return a / b - (a % b != 0 && a < 0 ? 1 : 0);
}

// Bit t: whether byte t is nonzero.
uint64_t nonzero_bits(const uint8_t* bytes, int64_t n) {
  uint64_t bits = 0;
  for (int64_t t = 0; t < n; t += 8) {
    const int64_t few = std::min<int64_t>(8, n - t);
    uint64_t word = 0;
    std::memcpy(&word, bytes + t, static_cast<size_t>(few));
    if (word == 0) continue;
    for (int64_t b = 0; b < few; ++b)
      bits |= uint64_t{bytes[t + b] != 0} << (t + b);
  }
  return bits;
}
uint64_t low_bits(int64_t n) {
  return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

int64_t slot_of(const SoftmaxDecodeCall& call, const DecodeRow& row,
                int64_t position) {
  const int64_t slot = position - row.start;
  return call.cache.is_ring ? slot % call.capacity : slot;
}

// A mask by slot, for n neighbouring positions.
uint64_t mask_bits(const SoftmaxDecodeCall& call, const DecodeRow& row,
                   const uint8_t* mask, int64_t stride, int64_t position,
                   int64_t n) {
  const uint8_t* of_row = mask + row.row * stride;
  const int64_t slot = slot_of(call, row, position);
  const int64_t straight = std::min(n, call.capacity - slot);
  uint64_t bits = nonzero_bits(of_row + slot, straight);
  if (straight < n) bits |= nonzero_bits(of_row, n - straight) << straight;
  return bits;
}

}  // namespace

SoftmaxDecodeCall::SoftmaxDecodeCall(const SoftmaxAttentionOptions& o,
                                     const SoftmaxAttentionInputs& in,
                                     const KvCacheView& kv, const View4& to)
    : options(o),
      inputs(in),
      cache(kv),
      out(to),
      dtype(in.q.dtype),
      dim(in.q.size[3]),
      value_dim(in.v.size[3]),
      heads(in.q.size[2]),
      kv_heads(in.k.size[2]),
      group(heads / kv_heads),
      capacity(kv.keys.size[1]),
      scale(o.scale != 0 ? o.scale : 1 / std::sqrt(static_cast<double>(dim))) {}

DecodeRow decode_row(const SoftmaxDecodeCall& call, int64_t row) {
  DecodeRow r;
  r.row = row;
  r.start = call.cache.start != nullptr ? call.cache.start[row] : 0;
  r.position = call.cache.position[row];
  r.first = r.start;
  if (call.cache.is_ring)
    r.first = std::max(r.first, r.position - call.capacity + 1);
  r.sees_all = !call.has_pattern();
  const uint8_t* globals = call.inputs.global_mask;
  if (globals != nullptr && globals[row * call.inputs.global_mask_stride +
                                    slot_of(call, r, r.position)] != 0)
    r.sees_all = true;
  // A window alone is all that there is to look at.
  const bool others = globals != nullptr || call.inputs.block_mask != nullptr;
  if (!r.sees_all && !others) {
    r.step = call.options.dilation;
    int64_t reach = (r.position - r.first) / r.step;
    if (call.options.window_left >= 0)
      reach = std::min(reach, call.options.window_left);
    r.first = r.position - reach * r.step;
  }
  r.count = (r.position - r.first) / r.step + 1;
  return r;
}

DecodeKeys::DecodeKeys(const SoftmaxDecodeCall& call, const DecodeRow& row,
                       int64_t head, int64_t begin, int64_t end)
    : call_(call), row_(row), head_(head), c_(begin), end_(end) {}

// Which of the candidates [c, c + n), at most 64, are visible.
uint64_t DecodeKeys::bits(int64_t c, int64_t n) const {
  const SoftmaxAttentionInputs& in = call_.inputs;
  const int64_t p0 = row_.first + c * row_.step;
  uint64_t real = low_bits(n);
  if (call_.cache.key_mask != nullptr) {
    const uint8_t* mask = call_.cache.key_mask;
    const int64_t stride = call_.cache.key_mask_stride;
    if (row_.step == 1) {
      real = mask_bits(call_, row_, mask, stride, p0, n);
    } else {
      for (int64_t t = 0; t < n; ++t) {
        const int64_t slot = slot_of(call_, row_, p0 + t * row_.step);
        if (mask[row_.row * stride + slot] == 0) real &= ~(uint64_t{1} << t);
      }
    }
  }
  const bool others = in.global_mask != nullptr || in.block_mask != nullptr;
  if (row_.sees_all || !others) return real;
  uint64_t allowed = 0;
  if (in.global_mask != nullptr) {
    allowed |=
        mask_bits(call_, row_, in.global_mask, in.global_mask_stride, p0, n);
  }
  if (call_.options.has_window) {
    // Behind the query by a multiple of the dilation, and not too far.
    const int64_t step = call_.options.dilation;
    const int64_t behind = row_.position - p0;
    int64_t t = behind % step;
    if (call_.options.window_left >= 0) {
      const int64_t far = behind - call_.options.window_left * step;
      if (far > t) t = far;  // a multiple behind, too
    }
    if (step == 1) {
      if (t < n) allowed |= low_bits(n) & ~low_bits(t);
    } else {
      for (; t < n; t += step) allowed |= uint64_t{1} << t;
    }
  }
  if (in.block_mask != nullptr) {
    const int64_t a = floor_div(row_.position, in.block_size);
    const int64_t h = in.block_mask_heads == 1 ? 0 : head_;
    for (int64_t t = 0; t < n && 0 <= a && a < in.q_blocks;) {
      const int64_t b = floor_div(p0 + t, in.block_size);
      const int64_t end = std::min(n, (b + 1) * in.block_size - p0);
      if (b >= 0 && b < in.kv_blocks &&
          in.block_mask[(h * in.q_blocks + a) * in.kv_blocks + b] != 0)
        allowed |= low_bits(end) & ~low_bits(t);
      t = end;
    }
  }
  return real & allowed;
}

int64_t DecodeKeys::next(DecodeKey* keys) {
  int64_t n = 0;
  for (;;) {
    while (rest_ != 0 && n < kDecodeKeys) {
      const int64_t c = group_ + std::countr_zero(rest_);
      rest_ &= rest_ - 1;
      const int64_t position = row_.first + c * row_.step;
      keys[n++] = {slot_of(call_, row_, position), position};
    }
    if (n == kDecodeKeys || c_ >= end_) return n;
    const int64_t count = std::min<int64_t>(64, end_ - c_);
    group_ = c_;
    rest_ = bits(c_, count);
    c_ += count;
  }
}

namespace {

// Candidates of a span, by shape alone: enough bytes to be worth a task.
int64_t span_length(const SoftmaxDecodeCall& call) {
  constexpr int64_t kBytes = 256 << 10;
  const int64_t token = call.kv_heads * (call.dim + call.value_dim) *
                        static_cast<int64_t>(size_of(call.dtype));
  return (std::max<int64_t>(1, kBytes / token) + 63) / 64 * 64;
}

struct Task {
  DecodeRow row;
  int64_t begin, end;
};

// out of a row from the partials of its spans.
template <typename T>
void finish_row(const SoftmaxDecodeCall& call, int64_t row, const T* partials,
                int64_t spans) {
  std::vector<T> sum(static_cast<size_t>(call.value_dim));
  for (int64_t h = 0; h < call.heads; ++h) {
    const auto part = [&](int64_t s) {
      return partials + s * partial_size(call) + h * (2 + call.value_dim);
    };
    T largest = -std::numeric_limits<T>::infinity(), total = 0;
    for (int64_t s = 0; s < spans; ++s) {
      if (part(s)[1] != 0) largest = std::max(largest, part(s)[0]);
    }
    std::fill(sum.begin(), sum.end(), T{0});
    bool any = false;
    for (int64_t s = 0; s < spans; ++s) {
      const T* of = part(s);
      if (of[1] == 0) continue;  // it saw nothing
      any = true;
      const T scale = of[0] == largest ? T{1} : std::exp2(of[0] - largest);
      total += scale * of[1];
      for (size_t c = 0; c < sum.size(); ++c) sum[c] += scale * of[2 + c];
    }
    for (T& x : sum) x = any ? x / total : T{0};
    const int64_t at = row * call.out.stride[0] + h * call.out.stride[2];
    for (size_t c = 0; c < sum.size(); ++c) {
      const size_t to = static_cast<size_t>(at) + c;
      if (call.dtype == DType::kBFloat16) {
        static_cast<uint16_t*>(call.out.data)[to] =
            float_to_bfloat16(static_cast<float>(sum[c]));
      } else if (call.dtype == DType::kFloat16) {
        static_cast<uint16_t*>(call.out.data)[to] =
            float_to_float16(static_cast<float>(sum[c]));
      } else {
        static_cast<T*>(call.out.data)[to] = sum[c];
      }
    }
  }
}

}  // namespace

Status run_softmax_decode(const SoftmaxDecodeCall& call,
                          const SoftmaxDecode& decode, Executor& executor) {
  const int64_t rows = call.inputs.q.size[0], length = span_length(call);
  std::vector<Task> tasks;
  std::vector<int64_t> first_of(1, 0);  // of a row's tasks
  for (int64_t r = 0; r < rows; ++r) {
    const DecodeRow row = decode_row(call, r);
    if (call.query_is_real(r)) {
      for (int64_t begin = 0; begin < row.count; begin += length)
        tasks.push_back({row, begin, std::min(begin + length, row.count)});
    }
    first_of.push_back(static_cast<int64_t>(tasks.size()));
  }
  const bool wide = call.dtype == DType::kFloat64;
  const size_t bytes = static_cast<size_t>(partial_size(call)) *
                       (wide ? sizeof(double) : sizeof(float));
  const int64_t num_tasks = static_cast<int64_t>(tasks.size());
  const Pieces partials(1, static_cast<size_t>(num_tasks) * bytes);
  const size_t scratch_bytes = decode.scratch_bytes(call);
  const Pieces scratch(executor.num_threads(), scratch_bytes);
  if (partials.failed() || scratch.failed()) {
    return Status(
        StatusCode::kOutOfMemory,
        str_cat("softmax_attention_decode_step: cannot allocate ",
                static_cast<size_t>(num_tasks) * bytes +
                    static_cast<size_t>(executor.num_threads()) * scratch_bytes,
                " bytes of working memory"));
  }
  char* const all = static_cast<char*>(partials[0]);
  executor.run(num_tasks, [&](int64_t t, int thread) {
    const Task& task = tasks[static_cast<size_t>(t)];
    decode.attend(call, task.row, task.begin, task.end, scratch[thread],
                  all + static_cast<size_t>(t) * bytes);
  });
  executor.run(rows, [&](int64_t r, int) {
    const int64_t first = first_of[static_cast<size_t>(r)];
    const int64_t spans = first_of[static_cast<size_t>(r) + 1] - first;
    const char* of_row = all + static_cast<size_t>(first) * bytes;
    if (wide) {
      finish_row(call, r, reinterpret_cast<const double*>(of_row), spans);
    } else {
      finish_row(call, r, reinterpret_cast<const float*>(of_row), spans);
    }
  });
  return Status();
}

}  // namespace cosformer::simd
