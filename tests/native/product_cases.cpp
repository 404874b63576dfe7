// Weights: packing, reading back, products. And what takes rows of floats.

#include "cases.h"

namespace toque {

namespace {

constexpr double TOLERANCE = 1e-6;

struct Multiplied {
  Block<float> linear;
  Block<float> gated;
};

// One input with two weights: as products of one loop, and as gate and up.
struct Problem {
  Weight first, second;
  Block<float> x, bias, residual;
  long rows, out, in;

  Multiplied run(const Kernels& kernels, Pool& pool, const float* from, long count) const {
    Block<uint8_t> scratch(input_scratch(count, in));
    Block<float> a(count * out), b(count * out), gated(count * out);
    const Input input{from, count, in, scratch.data()};
    const float* added = residual.size() ? residual.data() + (from - x.data()) / in * out : nullptr;
    const float* biases = bias.size() ? bias.data() : nullptr;
    const Product products[] = {{first.packed, biases, added, a.data()},
                                {second.packed, nullptr, nullptr, b.data()}};
    kernels.linear(pool, input, products, 2);
    Product gate = products[0];
    gate.residual = nullptr;
    gate.result = gated.data();
    kernels.gate_up_silu(pool, input, gate, products[1]);
    return {std::move(a), std::move(gated)};
  }
};

long inputs_of(Draw& draw, Kind kind) {
  if (is_float(kind)) return draw.of(1, 600);
  return block_size(kind).values * draw.of(1, block_size(kind).values == GROUP ? 19 : 4);
}

Problem drawn(Draw& draw, Pool& pool, Kind kind) {
  const long in = inputs_of(draw, kind), out = draw.of(1, 70);
  const long rows = draw.one_of<long>({1, 2, 3, 5, 7, 13, 16, 31, 64, 65, 67});
  return {pack(portable::kernels, pool, draw.stored(kind, out, in), kind, out, in),
          pack(portable::kernels, pool, draw.stored(kind, out, in), kind, out, in),
          draw.normals(rows * in),
          draw.normals(draw.coin() ? out : 0),
          draw.normals(draw.coin() ? rows * out : 0),
          rows,
          out,
          in};
}

// Packing moves numbers and reading them back is exact: equal bits on every instruction set.
void check_weight(const Kernels& kernels, Pools& pools, Draw& draw, const Weight& w) {
  const Packed& p = w.packed;
  const Weight again = pack(kernels, pools.three, w.file.copy(), p.kind, p.out, p.in);
  REQUIRE(same_bits(again.bytes, w.bytes), "%s packs kind %d", kernels.name, (int)p.kind);
  Block<float> values(p.out * p.in), expected(p.out * p.in);
  kernels.dequantize(pools.three, w.rows, values.data());
  portable::kernels.dequantize(pools.one, w.rows, expected.data());
  REQUIRE(same_bits(values, expected), "%s reads kind %d", kernels.name, (int)p.kind);
  const long tokens = draw.of(1, 9);
  Block<int32_t> ids(tokens);
  for (long t = 0; t < tokens; ++t) ids[t] = static_cast<int32_t>(draw.of(0, p.out - 1));
  Block<float> rows(tokens * p.in);
  kernels.embed(pools.three, p, ids.data(), tokens, rows.data());
  for (long t = 0; t < tokens; ++t) {
    REQUIRE(same_bits(rows.data() + t * p.in, expected.data() + ids[t] * p.in, p.in),
            "%s embeds kind %d", kernels.name, (int)p.kind);
  }
}

// Sets that compute alike down to the bits: the same integers, and the same order of multiply-adds
// that round once. Null for all others.
const Kernels* twin(const Kernels& kernels) {
#if defined(__aarch64__)
  if (&kernels == &neon_dot::kernels) return &neon::kernels;
#endif
  (void)kernels;
  return nullptr;
}

}  // namespace

void check_products(const Kernels& kernels, Pools& pools, Draw& draw, Kind kind) {
  const Problem p = drawn(draw, pools.one, kind);
  check_weight(kernels, pools, draw, p.first);
  const Multiplied all = p.run(kernels, pools.one, p.x.data(), p.rows);
  const Multiplied threads = p.run(kernels, pools.three, p.x.data(), p.rows);
  REQUIRE(same_bits(all.linear, threads.linear) && same_bits(all.gated, threads.gated),
          "%s on threads, kind %d", kernels.name, (int)kind);
  for (const long row : {0L, p.rows / 2, p.rows - 1}) {
    const Multiplied one = p.run(kernels, pools.three, p.x.data() + row * p.in, 1);
    REQUIRE(same_bits(one.linear.data(), all.linear.data() + row * p.out, p.out) &&
                same_bits(one.gated.data(), all.gated.data() + row * p.out, p.out),
            "%s: row %ld of %ld alone, kind %d", kernels.name, row, p.rows, (int)kind);
  }
  if (const Kernels* other = twin(kernels)) {
    const Multiplied same = p.run(*other, pools.one, p.x.data(), p.rows);
    REQUIRE(same_bits(all.linear, same.linear) && same_bits(all.gated, same.gated),
            "%s is not %s, kind %d [%ld, %ld] x %ld", kernels.name, other->name, (int)kind, p.out,
            p.in, p.rows);
  }
  const Multiplied expected = p.run(portable::kernels, pools.one, p.x.data(), p.rows);
  const double linear = difference(all.linear, expected.linear);
  const double gated = difference(all.gated, expected.gated);
  REQUIRE(linear <= TOLERANCE && gated <= 2 * TOLERANCE, "%s kind %d [%ld, %ld] x %ld: %g %g",
          kernels.name, (int)kind, p.out, p.in, p.rows, linear, gated);
}

// Scales of one, and inputs that are integers up to the largest: what comes out is a group's sum.
void check_group_sums(const Kernels& kernels, Pools& pools, Draw& draw) {
  constexpr long OUT = 19, LARGEST = 8191;
  for (const Kind kind : {Kind::Q4_0, Kind::Q5_0, Kind::Q8_0}) {
    Block<uint8_t> file = draw.stored(kind, OUT, GROUP);
    for (long row = 0; row < OUT; ++row) {
      const uint16_t one = 0x3c00;
      std::memcpy(&file[row * block_size(kind).bytes], &one, sizeof one);
    }
    const Weight w = pack(kernels, pools.one, std::move(file), kind, OUT, GROUP);
    Block<float> values(OUT * GROUP);
    kernels.dequantize(pools.one, w.rows, values.data());
    for (const long rows : {1L, 5L, 66L}) {
      Block<float> x(rows * GROUP), result(rows * OUT);
      for (long i = 0; i < x.size(); ++i) {
        x[i] = static_cast<float>(i % GROUP ? draw.of(-LARGEST, LARGEST) : LARGEST);
      }
      Block<uint8_t> scratch(input_scratch(rows, GROUP));
      const Product product{w.packed, nullptr, nullptr, result.data()};
      kernels.linear(pools.three, {x.data(), rows, GROUP, scratch.data()}, &product, 1);
      for (long i = 0; i < result.size(); ++i) {
        int64_t sum = 0;
        for (long k = 0; k < GROUP; ++k) {
          sum += static_cast<int64_t>(x[i / OUT * GROUP + k]) *
                 static_cast<int64_t>(values[i % OUT * GROUP + k]);
        }
        REQUIRE(result[i] == static_cast<float>(sum), "%s kind %d: %f is not %ld", kernels.name,
                (int)kind, result[i], (long)sum);
      }
    }
  }
}

// Q6_K's largest: weights of -32 with scales of -128, inputs of one sign. A sum of 32 products is
// 8191 * 2^17 and all eight groups' 8191 * 2^20: exact as floats, too.
void check_largest_sums(const Kernels& kernels, Pools& pools) {
  constexpr long OUT = 17, IN = 256, SCALES = 192, D = 208, BYTES = 210;
  Block<uint8_t> file(OUT * BYTES);
  std::memset(file.data(), 0, OUT * BYTES);
  for (long row = 0; row < OUT; ++row) {
    const uint16_t one = 0x3c00;
    std::memset(&file[row * BYTES + SCALES], 0x80, 16);
    std::memcpy(&file[row * BYTES + D], &one, sizeof one);
  }
  const Weight w = pack(kernels, pools.one, std::move(file), Kind::Q6_K, OUT, IN);
  for (const long rows : {1L, 2L, 7L}) {
    Block<float> x(rows * IN), result(rows * OUT);
    for (long i = 0; i < x.size(); ++i) x[i] = i / IN % 2 ? -8191.0f : 8191.0f;
    Block<uint8_t> scratch(input_scratch(rows, IN));
    const Product product{w.packed, nullptr, nullptr, result.data()};
    kernels.linear(pools.three, {x.data(), rows, IN, scratch.data()}, &product, 1);
    for (long i = 0; i < result.size(); ++i) {
      const float expected = 8191.0f * 32 * 128 * IN * (i / OUT % 2 ? -1 : 1);
      REQUIRE(result[i] == expected, "%s: %f is not %f", kernels.name, result[i], expected);
    }
  }
}

void check_rows(const Kernels& kernels, Pools& pools, Draw& draw) {
  const long rows = draw.of(1, 40), columns = draw.of(1, 200);
  const Block<float> x = draw.normals(rows * columns), weight = draw.normals(columns);
  Block<float> here(rows * columns), threads(rows * columns), expected(rows * columns);
  kernels.rms_norm(pools.one, x.data(), weight.data(), 1e-5f, rows, columns, here.data());
  kernels.rms_norm(pools.three, x.data(), weight.data(), 1e-5f, rows, columns, threads.data());
  portable::kernels.rms_norm(pools.one, x.data(), weight.data(), 1e-5f, rows, columns,
                             expected.data());
  REQUIRE(same_bits(here, threads), "%s: norms on threads", kernels.name);
  REQUIRE(difference(here, expected) <= TOLERANCE, "%s: norms", kernels.name);
}

}  // namespace toque
