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

  // Of outputs LANES * side and the LANES - 1 after it.
  TOQUE_MEMBER floats scale(int side) const {
    const floats d = load((const half*)record_ + LANES * side);
    if constexpr (!has_offset(KIND) || scales_bytes(KIND) == 0) return d;
    return d * bytes_to_floats(scales_ + LANES * side);
  }

  // Exact, and zero for kinds that have none.
  TOQUE_MEMBER floats offset(int side) const {
    if constexpr (!has_offset(KIND)) return splat(0);
    const floats m = load((const half*)record_ + PANEL + LANES * side);
    if constexpr (scales_bytes(KIND) == 0) return m;
    return -(m * bytes_to_floats(scales_ + PANEL + LANES * side));
  }

  // Inputs 2 p and 2 p + 1 of LANES outputs; ZERO is still to be subtracted.
  TOQUE_MEMBER shorts pair(long p, int side) const {
    if constexpr (!has_nibbles(KIND)) return widen(payload() + (p * PANEL + LANES * side) * 2);
    const shorts q = (shorts)unsigned_pair(p, side);
    if constexpr (KIND != Kind::Q6_K) return q;
    return (q - (int16_t)zero_point(KIND)) *
           widen_twice(scales_ + p / (PAIRS / 2) * PANEL + LANES * side);
  }

#if defined(TOQUE_HAS_DOT)
  // Four inputs of LANES outputs, as bytes: those of pairs p and p + 2, which are two nibbles of
  // the same word. ZERO is still to be subtracted; Q6_K's still lack their small_scale().
  template <long QUAD>
  TOQUE_MEMBER quads quad(int side) const {
    constexpr long p = QUAD / 2 * 4 + QUAD % 2;
    if constexpr (!has_nibbles(KIND)) {
      const uint8_t* from = payload() + (p * PANEL + LANES * side) * 2;
      return alternate(from, from + 2 * PANEL * 2);
    } else {
      const uquads both = (uquads)words(payload() + p / 4 * 64, side);
      ushorts q = (ushorts)(QUAD % 2 ? both >> 4 : both & 15);
      if constexpr (HIGH > 0) {
        q = with_bits(q, HIGH_MASK << 4, high_at<p, 4>(side));
        q = with_bits(q, HIGH_MASK << 12, high_at<p + 2, 12>(side));
      }
      return (quads)q - (int8_t)(KIND == Kind::Q6_K ? zero_point(KIND) : 0);
    }
  }

  static constexpr bool SCALED_HALVES = KIND == Kind::Q6_K;

  // Of inputs 16 * half and the 15 after it.
  TOQUE_MEMBER ints small_scale(long half, int side) const {
    return widen_bytes<int8_t>(scales_ + half * PANEL + LANES * side);
  }
#endif

  static constexpr int ZERO = KIND == Kind::Q6_K ? 0 : zero_point(KIND);

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

  TOQUE_MEMBER const uint8_t* payload() const { return scales_ + scales_bytes(KIND); }

  // Words of LANES outputs: 64 bytes hold them for all.
  TOQUE_MEMBER ushorts words(const uint8_t* all, int side) const {
    return (ushorts)load_shorts(all + LANES * side * 4);
  }

  static constexpr int HIGH = has_nibbles(KIND) ? high_bits(KIND) : 0;
  static constexpr int PER_WORD = HIGH > 0 ? 16 / HIGH : 16;  // pairs in a word of a plane
  static constexpr int HIGH_MASK = (1 << HIGH) - 1;

  TOQUE_MEMBER const uint8_t* plane(long p) const {
    return payload() + NIBBLES_BYTES + p / PER_WORD * PLANE_BYTES;
  }

  TOQUE_MEMBER ushorts unsigned_pair(long p, int side) const {
    const ushorts low = words(payload() + p / 4 * 64, side) >> (4 * (p % 4)) & 15;
    if constexpr (HIGH == 0) return low;
    const ushorts all = words(plane(p), side);
    const int place = HIGH * (int)(p % PER_WORD);
    return with_bits(low, HIGH_MASK << 4, place < 4 ? all << (4 - place) : all >> (place - 4));
  }

  // The words of pair P's plane, shifted until its bits stand at place TO.
  template <long P, int TO>
  TOQUE_MEMBER ushorts high_at(int side) const {
    constexpr int FROM = HIGH * (int)(P % PER_WORD);
    const ushorts all = words(plane(P), side);
    if constexpr (FROM > TO) return all >> (FROM - TO);
    return all << (TO - (FROM > TO ? TO : FROM));
  }

  TOQUE_MEMBER int word(const uint8_t* all, long column, long k) const {
    uint16_t word;
    memcpy(&word, all + 4 * column + k % 2 * 2, sizeof word);
    return word;
  }

  TOQUE_MEMBER int integer(long column, long k) const {
    if constexpr (!has_nibbles(KIND)) {
      return (int8_t)payload()[k / 2 * 2 * PANEL + 2 * column + k % 2];
    }
    const int low = word(payload() + k / 8 * 64, column, k) >> (4 * (k / 2 % 4)) & 15;
    if constexpr (HIGH == 0) return low;
    const int high = word(plane(k / 2), column, k) >> (HIGH * (k / 2 % PER_WORD)) & HIGH_MASK;
    return low | high << 4;
  }

  const uint8_t* record_;
  const uint8_t* scales_;  // then the payload
};

}  // namespace TOQUE_ISA
}  // namespace toque
