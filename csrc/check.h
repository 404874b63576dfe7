// What Python may hand over, and the checks that turn a wrong argument into an exception.
//
// The types below make nanobind refuse (TypeError) another dtype, rank or memory order; nothing is
// converted, since a hidden copy would be written to or thrown away. Sizes and indices are checked
// here: ValueError for sizes that do not fit together, IndexError for an index out of range.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace toque {

namespace nb = nanobind;

template <class Number, size_t RANK>
using Array = nb::ndarray<Number, nb::ndim<RANK>, nb::c_contig, nb::device::cpu>;

using Vector = Array<const float, 1>;
using Rows = Array<const float, 2>;    // [rows, columns]
using Heads = Array<const float, 3>;   // [tokens, heads, dim]
using OutRows = Array<float, 2>;
using OutHeads = Array<float, 3>;
using Bytes = Array<const uint8_t, 1>;
using Ints = Array<const int32_t, 1>;
using Longs = Array<const int64_t, 1>;
using IntTable = Array<const int32_t, 2>;
using PageBytes = Array<uint8_t, 2>;             // [pages, bytes of a page]
using ReadPageBytes = Array<const uint8_t, 2>;

inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

template <class Any>
inline long size_of(const Any& array, size_t axis) {
  return static_cast<long>(array.shape(axis));
}

inline void require_index(int64_t index, int64_t limit, const char* what) {
  if (index >= 0 && index < limit) return;
  throw std::out_of_range(std::string(what) + " " + std::to_string(index) + " is not in 0.." +
                          std::to_string(limit - 1));
}

template <class Numbers>
inline void require_indices(const Numbers& indices, int64_t limit, const char* what) {
  for (size_t i = 0; i < indices.size(); ++i) require_index(indices.data()[i], limit, what);
}

inline const float* data_or_null(const std::optional<Vector>& vector, long size, const char* what) {
  if (!vector) return nullptr;
  require(size_of(*vector, 0) == size, what);
  return vector->data();
}

// The names of KvType's values, in its order.
constexpr const char* KV_NAMES[] = {"float32", "float16", "bfloat16", "int8", "fp8_e4m3"};

// An array [pages, bytes of a page] and what it takes to read it.
template <class Any>
inline Pages checked_pages(const Any& bytes, const std::string& type, long kv_heads,
                           long block_size, long dim) {
  const auto found = std::find(std::begin(KV_NAMES), std::end(KV_NAMES), type);
  require(found != std::end(KV_NAMES), "unknown type of KV pages");
  require(kv_heads > 0 && block_size > 0 && dim > 0, "pages must not be empty");
  const Pages pages{const_cast<uint8_t*>(bytes.data()),
                    static_cast<KvType>(found - std::begin(KV_NAMES)), kv_heads, block_size, dim};
  // Divided, not multiplied: the product of three large numbers might wrap around to a fitting one.
  const long vectors = size_of(bytes, 1) / kv_heads / block_size;
  require(vectors > 0 && dim <= vectors && pages.page_bytes() == size_of(bytes, 1),
          "pages have not the size that their type, heads, dimension and tokens need");
  return pages;
}

// What the pages leave out of each key, where there is something.
inline RotatedBias checked_bias(const std::optional<Vector>& bias, const std::optional<Rows>& cos,
                                const std::optional<Rows>& sin, const Pages& pages) {
  if (!bias) return {nullptr, nullptr, nullptr, 0};
  const long pairs = pages.dim / 2;
  require(cos && sin, "a bias needs the rope table");
  require(size_of(*bias, 0) == pages.kv_heads * pages.dim, "bias is not [kv_heads * head_dim]");
  require(pages.dim % 2 == 0 && size_of(*cos, 1) == pairs && size_of(*sin, 1) == pairs &&
              size_of(*sin, 0) == size_of(*cos, 0),
          "the rope table has not head_dim / 2 columns");
  return {bias->data(), cos->data(), sin->data(), size_of(*cos, 0)};
}

}  // namespace toque
