// What Python may hand over, and the checks that turn a wrong argument into an exception.
//
// The types below make nanobind refuse (TypeError) another dtype, rank or memory order; nothing is
// converted, since a hidden copy would be written to or thrown away. Sizes and indices are checked
// here: ValueError for sizes that do not fit together, IndexError for an index out of range.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

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
using PageArray = nb::ndarray<nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using ReadPageArray = nb::ndarray<nb::ro, nb::ndim<4>, nb::c_contig, nb::device::cpu>;

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

// Both arrays are [pages, kv_heads, block_size, dim], float32 or float16.
template <class Any>
inline Pages checked_pages(const Any& keys, const Any& values) {
  constexpr nb::dlpack::dtype HALF{static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
  const bool is_half = keys.dtype() == HALF;
  require(is_half || keys.dtype() == nb::dtype<float>(), "pages must be float32 or float16");
  require(values.dtype() == keys.dtype(), "keys and values differ in dtype");
  for (size_t axis = 0; axis < 4; ++axis) {
    require(keys.shape(axis) == values.shape(axis), "keys and values differ in shape");
    require(axis == 0 || keys.shape(axis) > 0, "pages must not be empty");
  }
  return {const_cast<void*>(static_cast<const void*>(keys.data())),
          const_cast<void*>(static_cast<const void*>(values.data())),
          is_half,
          size_of(keys, 1),
          size_of(keys, 2),
          size_of(keys, 3)};
}

}  // namespace toque
