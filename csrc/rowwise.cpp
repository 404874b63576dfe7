// Ops that take each row by itself: RMS norm, and what happens to a token's query, key and value
// between their projections and attention.

#include "kernels.h"
#include "kv_numbers.h"
#include "simd.h"

namespace toque {
namespace TOQUE_ISA {

// 1 / sqrt(mean(x^2) + eps). Lane i of the sums gets elements i, i + 16, i + 32, ...
static float inverse_rms(const float* x, long count, float eps) {
  floats even = splat(0), odd = splat(0);
  long i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES) {
    const floats a = load(x + i), b = load(x + i + LANES);
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  for (; i < count; i += LANES) {
    const floats a = load_first(x + i, count - i < LANES ? count - i : LANES);
    even = fma(a, a, even);
  }
  return 1.0f / sqrtf(sum(even + odd) / (float)count + eps);
}

static void norm_row(const float* x, const float* weight, float eps, long count, float* to) {
  const float inverse = inverse_rms(x, count, eps);
  for (long i = 0; i < count; ++i) to[i] = x[i] * inverse * weight[i];
}

void rms_norm(Pool& pool, const float* x, const float* weight, float eps, long rows, long columns,
              float* result) {
  parallel_ranges(pool, rows, 4.0 * rows * columns, [=](long begin, long end, int) {
    for (long r = begin; r < end; ++r) {
      norm_row(x + r * columns, weight, eps, columns, result + r * columns);
    }
  });
}

// Turns each pair (i, i + dim / 2) by its position's angle (arXiv:2104.09864), in place.
static void rotate(float* head, const float* cos, const float* sin, long dim) {
  const long pairs = dim / 2;
  for (long i = 0; i < pairs; ++i) {
    const float first = head[i], second = head[i + pairs];
    head[i] = first * cos[i] - second * sin[i];
    head[i + pairs] = second * cos[i] + first * sin[i];
  }
}

static void norm_and_rotate(const RopeWrite& w, float* heads, long count, const float* norm,
                            long position) {
  const long dim = w.pages.dim;
  const long angles = position * (dim / 2);
  for (long h = 0; h < count; ++h) {
    float* head = heads + h * dim;
    if (norm) norm_row(head, norm, w.norm_eps, dim, head);
    rotate(head, w.cos + angles, w.sin + angles, dim);
  }
}

// Numbers to places `stride` numbers apart.
template <long BYTES>
static void scatter(const uint8_t* from, long count, long stride, uint8_t* to) {
  for (long i = 0; i < count; ++i) memcpy(to + i * stride * BYTES, from + i * BYTES, BYTES);
}

// A token's keys and values [kv_heads, dim] into place `write_at` of the pages. A key becomes
// numbers in its own memory first; in the page they lie block_size apart.
template <KvType TYPE>
static void write_heads(const Pages& p, float* keys, const float* values, int64_t write_at) {
  constexpr long BYTES = number_bytes(TYPE);
  const long page = write_at / p.block_size, offset = write_at % p.block_size;
  for (long h = 0; h < p.kv_heads; ++h) {
    uint8_t* numbers = (uint8_t*)(keys + h * p.dim);
    uint8_t* to = p.keys(page, h);
    narrow_vector<TYPE>(keys + h * p.dim, p.dim, numbers,
                        to + p.numbers_bytes() + offset * SCALE_BYTES, p.block_size * SCALE_BYTES);
    scatter<BYTES>(numbers, p.dim, p.block_size, to + offset * BYTES);
    to = p.values(page, h);
    narrow_vector<TYPE>(values + h * p.dim, p.dim, to + offset * p.dim * BYTES,
                        to + p.numbers_bytes() + offset * p.groups() * SCALE_BYTES, SCALE_BYTES);
  }
}

template <KvType TYPE>
static void rope_write_token(const RopeWrite& w, long token) {
  const long kv_width = w.pages.kv_heads * w.pages.dim;
  float* key = w.key + token * kv_width;
  const long position = w.positions[token];
  norm_and_rotate(w, w.query + token * w.heads * w.pages.dim, w.heads, w.query_norm, position);
  norm_and_rotate(w, key, w.pages.kv_heads, w.key_norm, position);
  write_heads<TYPE>(w.pages, key, w.value + token * kv_width, w.write_at[token]);
}

void rope_write(Pool& pool, const RopeWrite& w) {
  const double cost = 8.0 * w.tokens * (w.heads + w.pages.kv_heads) * w.pages.dim;
  parallel_ranges(pool, w.tokens, cost, [&](long begin, long end, int) {
    for (long token = begin; token < end; ++token) {
      switch (w.pages.type) {
        case KvType::F32: rope_write_token<KvType::F32>(w, token); break;
        case KvType::F16: rope_write_token<KvType::F16>(w, token); break;
        case KvType::BF16: rope_write_token<KvType::BF16>(w, token); break;
        case KvType::I8: rope_write_token<KvType::I8>(w, token); break;
        case KvType::E4M3: rope_write_token<KvType::E4M3>(w, token); break;
      }
    }
  });
}

}  // namespace TOQUE_ISA
}  // namespace toque
