// From the numbers in pages to the floats that attention multiplies.
//
// Keys lie [dim, block_size] in a page: LANES neighbouring ones are as many neighbouring numbers of
// each dimension, which is the panel that tile.h wants, without transposing.
#pragma once

#include "kv_numbers.h"
#include "tile.h"

namespace toque {
namespace TOQUE_ISA {

constexpr long CACHE_LINE = 64;

// Goes along the keys, or along the values, of one sequence and KV head. Does not look beyond the
// keys that it is asked for: the page table may have no place there.
class PageWalk {
 public:
  TOQUE_MEMBER PageWalk(const Pages& pages, const int32_t* table, long head, long position)
      : pages_(pages),
        head_(head),
        scales_at_(pages.numbers_bytes()),
        groups_(pages.groups()),
        page_(table + position / pages.block_size),
        offset_(position % pages.block_size) {}

  // The next `count` keys, PANEL at most, as columns of panel [dim, PANEL]. Of the columns beyond
  // them some are written, with anything. Moves PANEL on.
  template <KvType TYPE>
  TOQUE_MEMBER void take_keys(long count, float* panel) {
    for (long k = 0; k < PANEL; k += LANES) {
      if (k < count) take_lanes<TYPE>(count - k < LANES ? count - k : LANES, panel + k);
    }
  }

  // The next `count` values as rows of [count, stride].
  template <KvType TYPE>
  TOQUE_MEMBER void take_values(long count, float* to, long stride) {
    while (count > 0) {
      const long left = pages_.block_size - offset_, here = left < count ? left : count;
      const uint8_t* page = pages_.values(*page_, head_);
      const uint8_t* from = page + offset_ * pages_.dim * number_bytes(TYPE);
      const uint8_t* scales = page + scales_at_ + offset_ * groups_ * SCALE_BYTES;
      for (long k = 0; k < here; ++k, to += stride) {
        widen<TYPE>(from, scales, to);
        from += pages_.dim * number_bytes(TYPE);
        scales += groups_ * SCALE_BYTES;
      }
      count -= here;
      advance(here);
    }
  }

  // Asks for the keys of the panel after the next one, of which `left` are wanted. Pages are
  // scattered, and too short for the processor to notice a stream.
  template <KvType TYPE>
  TOQUE_MEMBER void prefetch_keys(long left) const {
    if (left <= 0 || pages_.block_size < PANEL) return;
    const long offset = offset_ + PANEL;
    const bool over = offset >= pages_.block_size;
    const long row = pages_.block_size * number_bytes(TYPE);  // bytes
    const uint8_t* from = pages_.keys(page_[over], head_) +
                          (over ? offset - pages_.block_size : offset) * number_bytes(TYPE);
    const long stride = row < CACHE_LINE ? CACHE_LINE : row;
    for (long byte = 0; byte < pages_.dim * row; byte += stride) __builtin_prefetch(from + byte);
  }

  // The same for the `count` values after the next `count` ones.
  template <KvType TYPE>
  TOQUE_MEMBER void prefetch_values(long left, long count) const {
    if (left <= 0) return;
    const long size = pages_.dim * number_bytes(TYPE), end = left < count ? left : count;
    const int32_t* page = page_ + (offset_ + count) / pages_.block_size;
    long offset = (offset_ + count) % pages_.block_size;
    for (long k = 0; k < end;) {
      const long here = pages_.block_size - offset < end - k ? pages_.block_size - offset : end - k;
      const uint8_t* from = pages_.values(*page, head_) + offset * size;
      for (long byte = 0; byte < here * size; byte += CACHE_LINE) __builtin_prefetch(from + byte);
      k += here, ++page, offset = 0;
    }
  }

 private:
  void advance(long count) {
    offset_ += count;
    while (offset_ >= pages_.block_size) offset_ -= pages_.block_size, ++page_;
  }

  template <KvType TYPE>
  TOQUE_MEMBER void take_lanes(long count, float* panel) {
    const uint8_t* page = pages_.keys(*page_, head_);
    if (pages_.block_size % LANES == 0) {
      constexpr long BYTES = number_bytes(TYPE);
      const uint8_t* scales = page + scales_at_ + offset_ * SCALE_BYTES;
      widen_lanes<TYPE>(page + offset_ * BYTES, pages_.block_size * BYTES, scales,
                        pages_.block_size * SCALE_BYTES, panel);
      if (count == LANES) advance(LANES);
    } else {
      gather_lanes<TYPE>(count, panel);
    }
  }

  // Pages whose size is no multiple of LANES: number by number.
  template <KvType TYPE>
  void gather_lanes(long count, float* panel) {
    constexpr long BYTES = number_bytes(TYPE);
    const uint8_t* keys[LANES] = {};
    const uint8_t* scales[LANES] = {};
    for (long i = 0; i < count; ++i) {
      const uint8_t* page = pages_.keys(*page_, head_);
      keys[i] = page + offset_ * BYTES;
      scales[i] = page + scales_at_ + offset_ * SCALE_BYTES;
      advance(1);
    }
    for (long d = 0; d < pages_.dim; ++d, panel += PANEL) {
      uint8_t numbers[LANES * BYTES] = {}, their_scales[LANES * SCALE_BYTES] = {};
      const long group = d / SCALE_GROUP;
      for (long i = 0; i < count; ++i) {
        memcpy(numbers + i * BYTES, keys[i] + d * pages_.block_size * BYTES, BYTES);
        if constexpr (TYPE == KvType::I8) {
          memcpy(their_scales + i * SCALE_BYTES,
                 scales[i] + group * pages_.block_size * SCALE_BYTES, SCALE_BYTES);
        }
      }
      floats x = load_numbers<TYPE>(numbers);
      if constexpr (TYPE == KvType::I8) x = x * load_bfloats(their_scales);
      store(panel, x);
    }
  }

  template <KvType TYPE>
  TOQUE_MEMBER void widen_lanes(const uint8_t* from, long stride, const uint8_t* scales,
                                long scale_stride, float* panel) const {
    for (long d = 0; d < pages_.dim; scales += scale_stride) {
      const long end = TYPE != KvType::I8 || pages_.dim - d < SCALE_GROUP ? pages_.dim
                                                                          : d + SCALE_GROUP;
      const floats scale = TYPE == KvType::I8 ? load_bfloats(scales) : splat(1);
      for (; d < end; ++d, from += stride, panel += PANEL) {
        floats x = load_numbers<TYPE>(from);
        if constexpr (TYPE == KvType::I8) x = x * scale;
        store(panel, x);
      }
    }
  }

  // One value [dim]; its last numbers are not followed by others that could be read.
  template <KvType TYPE>
  TOQUE_MEMBER void widen(const uint8_t* from, const uint8_t* scales, float* to) const {
    constexpr long BYTES = number_bytes(TYPE);
    long d = 0;
    for (; d + LANES <= pages_.dim; d += LANES) {
      store(to + d, scaled<TYPE>(load_numbers<TYPE>(from + d * BYTES), scales, d));
    }
    if (d == pages_.dim) return;
    uint8_t last[LANES * BYTES] = {};
    memcpy(last, from + d * BYTES, (pages_.dim - d) * BYTES);
    store_first(to + d, scaled<TYPE>(load_numbers<TYPE>(last), scales, d), pages_.dim - d);
  }

  template <KvType TYPE>
  TOQUE_INLINE floats scaled(floats numbers, const uint8_t* scales, long d) {
    if constexpr (TYPE != KvType::I8) return numbers;
    return numbers * splat(bfloat_at(scales + d / SCALE_GROUP * SCALE_BYTES));
  }

  const Pages& pages_;
  long head_;
  long scales_at_;  // bytes from the numbers
  long groups_;
  const int32_t* page_;  // where the next key lies
  long offset_;
};

// The bias at position p + j is the bias at p, turned by the angle of j positions: angles are
// proportional to positions. `steps` holds the latter for j < PANEL, as [2, dim / 2, PANEL]: cosines
// and sines, without the factor that some models scale both with (it is cos of position 0).
static inline void fill_steps(const Attention& a, float* steps) {
  const long pairs = a.pages.dim / 2;
  for (long i = 0; i < pairs; ++i) {
    for (long j = 0; j < PANEL; ++j) {
      const bool known = j < a.bias.positions;
      steps[i * PANEL + j] = known ? a.bias.cos[j * pairs + i] / a.bias.cos[i] : 0;
      steps[(pairs + i) * PANEL + j] = known ? a.bias.sin[j * pairs + i] / a.bias.cos[i] : 0;
    }
  }
}

// panel [dim, PANEL] += the bias as the keys at `position` and after it have it.
static inline void add_bias(const Attention& a, const float* steps, long position, long kv_head,
                            float* turned, float* panel) {
  const long pairs = a.pages.dim / 2;
  const float* bias = a.bias.bias + kv_head * a.pages.dim;
  const float* cos = a.bias.cos + position * pairs;
  const float* sin = a.bias.sin + position * pairs;
  for (long i = 0; i < pairs; ++i) {
    turned[i] = bias[i] * cos[i] - bias[i + pairs] * sin[i];
    turned[i + pairs] = bias[i + pairs] * cos[i] + bias[i] * sin[i];
  }
  for (long i = 0; i < pairs; ++i) {
    const floats first = splat(turned[i]), second = splat(turned[i + pairs]);
    for (long j = 0; j < PANEL; j += LANES) {
      const floats c = load(steps + i * PANEL + j), s = load(steps + (pairs + i) * PANEL + j);
      float* low = panel + i * PANEL + j;
      float* high = panel + (i + pairs) * PANEL + j;
      store(low, fma(splat(-1) * second, s, fma(first, c, load(low))));
      store(high, fma(first, s, fma(second, c, load(high))));
    }
  }
}

}  // namespace TOQUE_ISA
}  // namespace toque
