// How weight matrices lie in memory once packed, the same on every machine and at any address.
//
// A matrix [out, in] is cut into panels of PANEL outputs (the last one filled up with zeros), one
// after the other. F32, F16 and BF16 panels are [in, PANEL] numbers as the file has them. Every
// other kind is packed exactly: integers of 4 or 8 bits, and the file's own scales, so that
// weight = scale * q + offset with nothing rounded before float32. A panel is a run of records:
//
//     record   | d, PANEL halves | m, PANEL halves | group | group | ...
//     group    | scales, PANEL bytes | more, PANEL bytes | payload of GROUP inputs x PANEL outputs |
//
//     kind        m   groups  scales and more             bits   scale    offset    bytes/weight
//     Q8_0        -   1       -                           8      d        -         1.0625
//     Q6_K        -   8       scales of 16 inputs each    6      d*scale  -32*...   0.8203
//     Q5_0        -   1       -                           5      d        -16*d     0.6875
//     Q5_1        m   1       -                           5      d        m         0.75
//     Q5_K        m   8       scale, minimum              5      d*scale  -m*min    0.7031
//     Q4_0        -   1       -                           4      d        -8*d      0.5625
//     Q4_1        m   1       -                           4      d        m         0.625
//     Q4_K        m   8       scale, minimum              4      d*scale  -m*min    0.5781
//
// A product d * scale needs 17 bits, so that keeping it as a half would change the weight.
//
// Payload of 8 bits: inputs in pairs, one after the other; of each pair all outputs, two int8 each.
// 32 bytes, widened, are the operands of one multiply-add of neighbours for all outputs:
//
//     pair p:   | o0 k0 | o0 k1 | o1 k0 | o1 k1 | ... | o15 k1 |          k0 = 2 p, k1 = 2 p + 1
//
// Payload of 4 bits: 16-bit words in that order, for four pairs at once, 64 bytes. The nibbles of a
// word, from the lowest on, belong to pairs 4 i, 4 i + 1, 4 i + 2 and 4 i + 3.
//
// Payload of 5 or 6 bits: the four lower ones so, then planes of the high ones: 64 bytes of words
// in the same order, of which each holds the high bits of sixteen or eight pairs, those of the first
// in the lowest place.
#pragma once

#include <stdint.h>

namespace toque {

// Goes up whenever packed bytes change their meaning: bytes of another layout may be in a file.
constexpr int LAYOUT = 2;

// Outputs of a packed weight panel, and columns of every register tile.
constexpr long PANEL = 16;
// Inputs that share a scale, in weights as in quantized activations.
constexpr long GROUP = 32;
constexpr long PAIRS = GROUP / 2;

constexpr long panels_for(long out) { return (out + PANEL - 1) / PANEL; }

// In the order of the names in bind.cpp.
enum class Kind { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

// A block as it lies in a file.
struct BlockSize {
  long values;
  long bytes;
};

constexpr BlockSize block_size(Kind kind) {
  constexpr BlockSize sizes[] = {{1, 4},   {1, 2},   {1, 2},     {32, 18},   {32, 20}, {32, 22},
                                 {32, 24}, {32, 34}, {256, 144}, {256, 176}, {256, 210}};
  return sizes[static_cast<int>(kind)];
}

constexpr bool is_float(Kind kind) { return kind <= Kind::BF16; }
constexpr bool has_offset(Kind kind) {
  return kind == Kind::Q4_1 || kind == Kind::Q5_1 || kind == Kind::Q4_K || kind == Kind::Q5_K;
}
// Bits of a weight.
constexpr int bits(Kind kind) {
  constexpr int all[] = {32, 16, 16, 4, 4, 5, 5, 8, 4, 5, 6};
  return all[static_cast<int>(kind)];
}
constexpr bool has_nibbles(Kind kind) { return bits(kind) < 8; }
constexpr int high_bits(Kind kind) { return bits(kind) - 4; }  // of kinds with nibbles
// The integer that stands for zero: subtracted from q before it is scaled.
constexpr int zero_point(Kind kind) {
  return kind == Kind::Q4_0 ? 8 : kind == Kind::Q5_0 ? 16 : kind == Kind::Q6_K ? 32 : 0;
}

constexpr long groups_per_record(Kind kind) { return block_size(kind).values / GROUP; }
constexpr long NIBBLES_BYTES = GROUP * PANEL / 2;
constexpr long PLANE_BYTES = GROUP * PANEL / 8;
constexpr long halves_bytes(Kind kind) { return (has_offset(kind) ? 2 : 1) * PANEL * 2; }
constexpr long scales_bytes(Kind kind) { return groups_per_record(kind) > 1 ? 2 * PANEL : 0; }
constexpr long group_bytes(Kind kind) {
  return scales_bytes(kind) + GROUP * PANEL * bits(kind) / 8;
}
constexpr long record_bytes(Kind kind) {
  return halves_bytes(kind) + groups_per_record(kind) * group_bytes(kind);
}

constexpr long panel_bytes(Kind kind, long in) {
  if (is_float(kind)) return in * PANEL * block_size(kind).bytes;
  return in / block_size(kind).values * record_bytes(kind);
}

constexpr long packed_bytes(Kind kind, long out, long in) {
  return panels_for(out) * panel_bytes(kind, in);
}

// A packed matrix, on a multiple of 64 bytes.
struct Packed {
  Kind kind;
  const uint8_t* data;  // packed_bytes(kind, out, in)
  long out;
  long in;  // a multiple of the kind's block
};

}  // namespace toque
