// XXH64, to notice a wrong byte in a file of packed weights: as fast as memory on one thread or two.
//
// The algorithm (public specification, BSD):
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md. The seed is 0. Words are read as
// they lie, which is the specification's order on little-endian machines, the only ones we run on.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace toque {

static_assert(std::endian::native == std::endian::little);

class Xxh64 {
 public:
  static uint64_t of(const uint8_t* data, uint64_t size) {
    const uint8_t *at = data, *end = data + size;
    uint64_t hash = size < STRIPE ? P5 : stripes(at, end);
    hash += size;
    for (; end - at >= 8; at += 8) hash = std::rotl(hash ^ round(0, word(at)), 27) * P1 + P4;
    if (end - at >= 4) {
      uint32_t half;
      memcpy(&half, at, 4);
      hash = std::rotl(hash ^ half * P1, 23) * P2 + P3;
      at += 4;
    }
    for (; at < end; ++at) hash = std::rotl(hash ^ *at * P5, 11) * P1;
    hash = (hash ^ hash >> 33) * P2;
    hash = (hash ^ hash >> 29) * P3;
    return hash ^ hash >> 32;
  }

 private:
  static constexpr uint64_t P1 = 0x9E3779B185EBCA87, P2 = 0xC2B2AE3D27D4EB4F,
                            P3 = 0x165667B19E3779F9, P4 = 0x85EBCA77C2B2AE63,
                            P5 = 0x27D4EB2F165667C5;
  static constexpr long STRIPE = 32;

  static uint64_t word(const uint8_t* at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
  }
  static uint64_t round(uint64_t lane, uint64_t input) {
    return std::rotl(lane + input * P2, 31) * P1;
  }

  // Four lanes side by side: their multiplications do not wait for each other.
  static uint64_t stripes(const uint8_t*& at, const uint8_t* end) {
    uint64_t lanes[4] = {P1 + P2, P2, 0, 0 - P1};
    for (; end - at >= STRIPE; at += STRIPE) {
      for (int i = 0; i < 4; ++i) lanes[i] = round(lanes[i], word(at + 8 * i));
    }
    uint64_t hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
                    std::rotl(lanes[3], 18);
    for (const uint64_t lane : lanes) hash = (hash ^ round(0, lane)) * P1 + P4;
    return hash;
  }
};

}  // namespace toque
