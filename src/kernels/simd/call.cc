#include "kernels/simd/call.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace cosformer::simd {

LinearCall::LinearCall(const LinearAttentionOptions& o,
                       const LinearAttentionInputs& in)
    : options(o),
      inputs(in),
      dtype(in.q.dtype),
      dim(in.q.size[3]),
      value_dim(in.v.size[3]),
      heads(in.q.size[2]),
      kv_heads(in.k.size[2]),
      group(heads / kv_heads),
      cosine(o.reweight_len > 0),
      rotary(o.rotary_base != 0),
      normalize(o.normalizer == Normalizer::kSum),
      parts(cosine ? 2 : 1),
      chunk_limit(cosine ? std::clamp<int64_t>(o.reweight_len / 2, 1, kMaxChunk)
                         : kMaxChunk) {}

int64_t LinearCall::kv_state_at(const Unit& unit) const {
  return k_sum_at(unit) * value_dim;
}
int64_t LinearCall::k_sum_at(const Unit& unit) const {
  return (unit.row_index * kv_heads + unit.head) * parts * dim;
}

Unit make_unit(const LinearCall& call, int64_t row_index, int64_t head) {
  Unit unit;
  unit.row = attention_row(call.inputs, row_index);
  unit.row_index = row_index;
  unit.head = head;
  const AttentionRow& row = unit.row;
  int64_t first = 0;
  if (call.inputs.key_mask != nullptr) {
    const uint8_t* mask =
        call.inputs.key_mask + row.batch * call.inputs.key_mask_stride;
    while (first < row.kv_len && mask[first] == 0) ++first;
  }
  int64_t last = row.q_len;
  if (call.inputs.query_mask != nullptr) {
    const uint8_t* mask =
        call.inputs.query_mask + row.batch * call.inputs.query_mask_stride;
    while (last > 0 && mask[last - 1] == 0) --last;
  }
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  constexpr int64_t kAlways = std::numeric_limits<int64_t>::min();
  const bool causal = call.options.is_causal;
  unit.visible_from = first == row.kv_len ? kNever
                      : causal            ? row.kv_start + first
                                          : kAlways;
  if (row.state_position > row.state_start || call.wants_d_state())
    unit.visible_from = kAlways;
  unit.seen_until = last == 0 ? kAlways : causal ? row.q_start + last : kNever;
  if (call.has_d_state_out()) unit.seen_until = kNever;
  return unit;
}

namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Bits [from, to) of a word.
uint64_t bits(int64_t from, int64_t to) {
  if (to <= from) return 0;
  const uint64_t upto = to >= 64 ? ~uint64_t{0} : (uint64_t{1} << to) - 1;
  return upto & ~((uint64_t{1} << from) - 1);
}

Slots slots(int64_t start, int64_t len, const uint8_t* mask, int64_t position,
            int64_t n) {
  const int64_t from = std::clamp<int64_t>(start - position, 0, n);
  const int64_t to = std::clamp<int64_t>(start + len - position, 0, n);
  Slots s;
  s.present = s.real = bits(from, to);
  if (mask != nullptr) {
    for (int64_t slot = from; slot < to; ++slot)
      if (mask[position + slot - start] == 0) s.real &= ~(uint64_t{1} << slot);
  }
  return s;
}

}  // namespace

Slots query_slots(const LinearCall& call, const Unit& unit, int64_t position,
                  int64_t n) {
  const uint8_t* mask = call.inputs.query_mask;
  if (mask != nullptr) mask += unit.row.batch * call.inputs.query_mask_stride;
  Slots s = slots(unit.row.q_start, unit.row.q_len, mask, position, n);
  s.real &= ~bits(
      0, std::clamp(unit.visible_from, position, position + n) - position);
  return s;
}

Slots key_slots(const LinearCall& call, const Unit& unit, int64_t position,
                int64_t n) {
  const uint8_t* mask = call.inputs.key_mask;
  if (mask != nullptr) mask += unit.row.batch * call.inputs.key_mask_stride;
  return slots(unit.row.kv_start, unit.row.kv_len, mask, position, n);
}

Slots seen_key_slots(const LinearCall& call, const Unit& unit, int64_t position,
                     int64_t n) {
  Slots s = key_slots(call, unit, position, n);
  s.real &=
      bits(0, std::clamp(unit.seen_until, position, position + n) - position);
  return s;
}

template <typename T>
int64_t Angles<T>::size(const LinearCall& call, int64_t chunk) {
  const int64_t doubles = 8 / static_cast<int64_t>(sizeof(T));
  return 2 * (kBlock + kMaxChunk) +
         (call.rotary ? chunk * call.dim + doubles * (3 * call.dim / 2 + 1)
                      : 0);
}

template <typename T>
Angles<T>::Angles(const LinearCall& call, int64_t chunk, T* memory)
    : call_(call), chunk_(chunk), main_(memory) {}

template <typename T>
void Angles<T>::start() {
  ratio_ = main_ + kBlock + kMaxChunk;
  rotary_cos_ = ratio_ + kBlock + kMaxChunk;
  rotary_sin_ = rotary_cos_ + (call_.rotary ? chunk_ * call_.dim / 2 : 0);
  std::fill_n(main_, kBlock + kMaxChunk, T{1});
  std::fill_n(ratio_, kBlock + kMaxChunk, T{0});
  std::fill_n(part_, kBlock, uint8_t{0});
  if (call_.rotary) {
    const int64_t half = call_.dim / 2;
    const int64_t tables =
        round_up(2 * (kBlock + kMaxChunk) + chunk_ * call_.dim,
                 8 / static_cast<int64_t>(sizeof(T)));
    frequency_ = reinterpret_cast<double*>(main_ + tables);
    turn_cos_ = frequency_ + half;
    turn_sin_ = turn_cos_ + half;
    for (int64_t c = 0; c < half; ++c) {
      frequency_[c] = std::pow(
          call_.options.rotary_base,
          -2.0 * static_cast<double>(c) / static_cast<double>(call_.dim));
      turn_cos_[c] = std::cos(frequency_[c]);
      turn_sin_[c] = std::sin(frequency_[c]);
    }
  }
  if (!call_.cosine) return;
  const double turn =
      std::numbers::pi / 2 / static_cast<double>(call_.options.reweight_len);
  for (int64_t i = 0; i < kAngleGroup; ++i) {
    step_cos_[i] = std::cos(turn * static_cast<double>(i));
    step_sin_[i] = std::sin(turn * static_cast<double>(i));
  }
}

// Whole periods of 4 M positions are taken off in integers: far positions are
// as exact as near ones. Within a group angles are added by their cosines and
// sines: two calls of the library serve kAngleGroup positions.
template <typename T>
void Angles<T>::fill_cosine(int64_t begin, int64_t end, int64_t origin,
                            int64_t chunk) {
  if (begin_ == begin && end_ == end && origin_ == origin && cut_ == chunk)
    return;
  begin_ = begin;
  end_ = end;
  origin_ = origin;
  cut_ = chunk;
  const int64_t count = end - begin;
  const int64_t m = call_.options.reweight_len;
  for (int64_t g = 0; g < count; g += kAngleGroup) {
    const double part = static_cast<double>((begin + g - origin) % (4 * m)) /
                        static_cast<double>(m);
    const double c = std::cos(std::numbers::pi / 2 * part);
    const double s = std::sin(std::numbers::pi / 2 * part);
    for (int64_t i = 0; i < kAngleGroup; ++i) {
      main_[g + i] = static_cast<T>(c * step_cos_[i] - s * step_sin_[i]);
      ratio_[g + i] = static_cast<T>(s * step_cos_[i] + c * step_sin_[i]);
    }
  }
  for (int64_t g = 0; g < count; g += chunk) {
    const int64_t last = std::min(g + chunk, count), middle = (g + last) / 2;
    // Where both are alike rounding must not decide.
    const bool sine =
        std::abs(ratio_[middle]) > T(1.001) * std::abs(main_[middle]);
    part_[g] = sine ? 1 : 0;
    for (int64_t i = g; i < last; ++i) {
      if (sine) std::swap(main_[i], ratio_[i]);
      ratio_[i] /= main_[i];
    }
  }
}

// The angle of a position is position x frequency, rounded once. From one
// position to the next the angle is turned by the frequency, and by how much
// the rounding moved it, which matters where positions are large.
template <typename T>
void Angles<T>::fill_rotary(int64_t position, int64_t size) {
  if (turned_ && turned_position_ == position && turned_size_ >= size) return;
  turned_ = true;
  turned_position_ = position;
  turned_size_ = size;
  constexpr double kSmall = 1e-7;  // its square is nothing in double
  const int64_t half = call_.dim / 2;
  for (int64_t c = 0; c < half; ++c) {
    const double frequency = frequency_[c];
    double angle = static_cast<double>(position) * frequency;
    double cos = std::cos(angle), sin = std::sin(angle);
    rotary_cos_[c] = static_cast<T>(cos);
    rotary_sin_[c] = static_cast<T>(sin);
    for (int64_t i = 1; i < size; ++i) {
      const double next = static_cast<double>(position + i) * frequency;
      const double moved = (next - angle) - frequency;
      angle = next;
      if (std::abs(moved) < kSmall) {
        const double turned_cos = cos * turn_cos_[c] - sin * turn_sin_[c];
        const double turned_sin = sin * turn_cos_[c] + cos * turn_sin_[c];
        cos = turned_cos - moved * turned_sin;
        sin = turned_sin + moved * turned_cos;
      } else {
        cos = std::cos(angle);
        sin = std::sin(angle);
      }
      rotary_cos_[i * half + c] = static_cast<T>(cos);
      rotary_sin_[i * half + c] = static_cast<T>(sin);
    }
  }
}

template <typename T>
Chunk<T> Angles<T>::chunk(int64_t begin, int64_t end, int64_t position) {
  const int64_t size = std::min(chunk_, end - position);
  if (call_.cosine) fill_cosine(begin, end, 0, chunk_);
  if (call_.rotary) fill_rotary(position, size);
  const int64_t at = call_.cosine ? position - begin : 0;
  return {position,    size,        part_[at],  main_ + at,
          ratio_ + at, rotary_cos_, rotary_sin_};
}

template <typename T>
Chunk<T> Angles<T>::alone(int64_t begin, int64_t end, int64_t longest) {
  if (call_.cosine) {
    const int64_t reach = std::min(call_.options.reweight_len, longest);
    fill_cosine(begin, end, begin + reach / 2, end - begin);
  }
  return {begin, end - begin, part_[0], main_, ratio_, nullptr, nullptr};
}

template class Angles<float>;
template class Angles<double>;

}  // namespace cosformer::simd
