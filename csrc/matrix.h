// A packed weight matrix as Python holds it.
#pragma once

#include "check.h"
#include "memory.h"

namespace toque {

// The names of Kind's values, in its order.
constexpr const char* KIND_NAMES[] = {"F32",  "F16",  "BF16", "Q4_0", "Q4_1", "Q5_0",
                                      "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"};

// A packed weight matrix, immutable once made: one block of bytes, see layout.h.
//
// Owns: its bytes, or a hold on the array that lent them. Knows: their kind and shape.
class Matrix {
 public:
  Matrix(Kind kind, long out, long in)
      : owned_(allocate_bytes(packed_bytes(kind, out, in))), packed_{kind, owned_.get(), out, in} {}

  // On bytes of another matrix, from a file for example, which are not copied.
  Matrix(Kind kind, const Bytes& data, long out, long in)
      : lent_(data), packed_{kind, data.data(), out, in} {}

  const Packed& packed() const { return packed_; }
  uint8_t* data() { return owned_.get(); }  // of a matrix that has bytes of its own
  size_t bytes() const {
    return static_cast<size_t>(packed_bytes(packed_.kind, packed_.out, packed_.in));
  }
  nb::tuple shape() const { return nb::make_tuple(packed_.out, packed_.in); }
  const char* kind() const { return KIND_NAMES[static_cast<int>(packed_.kind)]; }

 private:
  ByteArray owned_;
  Bytes lent_;
  Packed packed_;
};

}  // namespace toque
