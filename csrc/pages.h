// What a page of keys and values looks like: drawn in src/toque/kernels/api.py at LayerKV.
#pragma once

#include <stdint.h>

namespace toque {

// In the order of bind.cpp's KV_NAMES.
enum class KvType { F32, F16, BF16, I8, E4M3 };

constexpr long number_bytes(KvType type) {
  return type == KvType::F32 ? 4 : type == KvType::F16 || type == KvType::BF16 ? 2 : 1;
}

// Numbers of one vector that share a scale, a bfloat16; only int8 has scales.
constexpr long SCALE_GROUP = 32;
constexpr long SCALE_BYTES = 2;

constexpr long scale_groups(KvType type, long dim) {
  return type == KvType::I8 ? (dim + SCALE_GROUP - 1) / SCALE_GROUP : 0;
}

struct Pages {
  uint8_t* bytes;  // [pages, kv_heads, head_bytes()]
  KvType type;
  long kv_heads;
  long block_size;
  long dim;

  long groups() const { return scale_groups(type, dim); }
  long numbers_bytes() const { return block_size * dim * number_bytes(type); }
  long part_bytes() const { return numbers_bytes() + block_size * groups() * SCALE_BYTES; }
  long head_bytes() const { return 2 * part_bytes(); }
  long page_bytes() const { return kv_heads * head_bytes(); }
  uint8_t* keys(long page, long head) const {  // [dim, block_size], scales [groups, block_size]
    return bytes + (page * kv_heads + head) * head_bytes();
  }
  uint8_t* values(long page, long head) const {  // [block_size, dim], scales [block_size, groups]
    return keys(page, head) + part_bytes();
  }
};

}  // namespace toque
