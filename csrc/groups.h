// Reading packed integer weights: the only code that knows where layout.h puts a group's numbers.
#pragma once

#include "blocks.h"

namespace toque {
namespace TOQUE_ISA {

// GROUP inputs of a panel, as the products want them: pair after pair, 16-bit integers. For Q6_K
// each integer is already multiplied with its small scale, which leaves one float scale for all.
template <Kind KIND>
class Group {
 public:
  Group(const uint8_t* panel, long index)
      : record_(panel + index / PER_RECORD * record_bytes(KIND)),
        scales_(record_ + halves_bytes(KIND) + index % PER_RECORD * group_bytes(KIND)) {}

  // Of outputs LANES * side .. LANES * side + 7.
  TOQUE_MEMBER f32x8 scale(int side) const {
    const f32x8 d = load((const half*)record_ + LANES * side);
    if constexpr (!has_offset(KIND) || scales_bytes(KIND) == 0) return d;
    return d * bytes_to_floats(scales_ + LANES * side);
  }

  // Exact, and zero for kinds that have none.
  TOQUE_MEMBER f32x8 offset(int side) const {
    if constexpr (!has_offset(KIND)) return splat(0);
    const f32x8 m = load((const half*)record_ + PANEL + LANES * side);
    if constexpr (scales_bytes(KIND) == 0) return m;
    return -(m * bytes_to_floats(scales_ + PANEL + LANES * side));
  }

  // Inputs 2 p and 2 p + 1 of eight outputs; zero_point() is still to be subtracted.
  TOQUE_MEMBER i16x16 pair(long p, int side) const {
    const uint8_t* payload = scales_ + scales_bytes(KIND);
    if constexpr (has_nibbles(KIND)) {
      const u16x16 four = (u16x16)load_shorts(payload + p / 4 * 64 + side * 32);
      return (i16x16)(four >> (4 * (p % 4)) & 15);
    }
    const i16x16 q = widen(payload + p * 2 * PANEL + PANEL * side);
    if constexpr (KIND != Kind::Q6_K) return q;
    return q * widen_twice(scales_ + p / (PAIRS / 2) * PANEL + LANES * side);
  }

  // Of one output, in the file's numbers: `column` of the panel, GROUP values.
  TOQUE_MEMBER void values(long column, float* to) const {
    const int side = (int)(column / LANES), lane = (int)(column % LANES);
    const float step = scale(side)[lane], added = offset(side)[lane];
    for (long k = 0; k < GROUP; ++k) {
      float s = step;
      if (KIND == Kind::Q6_K) s *= (float)(int8_t)scales_[k / 16 * PANEL + column];
      const float value = s * (float)(integer(column, k) - zero_point(KIND));
      to[k] = has_offset(KIND) ? value + added : value;
    }
  }

 private:
  static constexpr long PER_RECORD = groups_per_record(KIND);

  TOQUE_MEMBER int integer(long column, long k) const {
    const uint8_t* payload = scales_ + scales_bytes(KIND);
    if constexpr (!has_nibbles(KIND)) {
      return (int8_t)payload[k / 2 * 2 * PANEL + 2 * column + k % 2];
    }
    uint16_t four;
    memcpy(&four, payload + k / 8 * 64 + column / 8 * 32 + column % 8 * 4 + k % 2 * 2, 2);
    return four >> (4 * (k / 2 % 4)) & 15;
  }

  const uint8_t* record_;
  const uint8_t* scales_;  // then the payload
};

}  // namespace TOQUE_ISA
}  // namespace toque
