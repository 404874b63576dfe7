// The Python module toque.kernels.cpu._native: checks arguments, lets go of the GIL, calls kernels.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "bind_program.h"
#include "bind_sample.h"
#include "check.h"
#include "checksum.h"
#include "decode.h"
#include "isa.h"
#include "matrix.h"
#include "pool.h"
#include "token_blocks.h"

namespace toque {

using namespace nb::literals;

static Kind kind_of(const std::string& name) {
  const auto found = std::find(std::begin(KIND_NAMES), std::end(KIND_NAMES), name);
  require(found != std::end(KIND_NAMES), "unknown tensor kind");
  return static_cast<Kind>(found - std::begin(KIND_NAMES));
}

static void require_shape(Kind kind, long rows, long columns) {
  require(rows > 0 && columns > 0, "a matrix must not be empty");
  require(columns % block_size(kind).values == 0, "rows are not whole blocks");
}

static StoredRows stored_rows(const std::string& name, const Bytes& data, long rows, long columns) {
  const Kind kind = kind_of(name);
  const BlockSize size = block_size(kind);
  require_shape(kind, rows, columns);
  require(size_of(data, 0) / rows == columns / size.values * size.bytes &&
              size_of(data, 0) % rows == 0,
          "data has not the size that its kind and shape need");
  return {kind, data.data(), rows, columns};
}

// Thread pool and kernels of one CpuOps.
//
// Owns: the pool. Knows: how arguments must fit together. Does not know: models, Python's types.
class Backend {
 private:
  template <class Function>
  auto without_gil(Function function) const {
    const std::shared_ptr<Pool> pool = pool_;  // set_threads() may replace it meanwhile
    nb::gil_scoped_release released;
    return function(*pool);
  }

 public:
  explicit Backend(int threads) : kernels_(choose_kernels()) { set_threads(threads); }

  const char* isa() const { return kernels_.name; }
  int threads() const { return pool_->threads(); }

  double multiply_adds(long rounds) const {
    require(rounds > 0, "rounds must be positive");
    return without_gil([&](Pool& pool) { return kernels_.multiply_adds(pool, rounds); });
  }

  // Calls that run in other threads go on with the pool they began with.
  void set_threads(int threads) {
    require(threads >= 1 && threads <= 1024, "threads must be in 1..1024");
    pool_ = std::make_shared<Pool>(threads);
  }

  std::unique_ptr<Matrix> pack(const std::string& kind, Bytes data, long out, long in) const {
    const StoredRows rows = stored_rows(kind, data, out, in);
    auto matrix = std::make_unique<Matrix>(rows.kind, out, in);
    without_gil([&](Pool& pool) { kernels_.pack(pool, rows, matrix->data()); });
    return matrix;
  }

  // The inverse of Matrix.packed: a matrix on those bytes, which stay where they are.
  std::unique_ptr<Matrix> matrix_of(const std::string& name, Bytes packed, long out,
                                    long in) const {
    const Kind kind = kind_of(name);
    require_shape(kind, out, in);
    require(out <= std::numeric_limits<int32_t>::max() && in <= std::numeric_limits<int32_t>::max(),
            "the matrix is too large");
    require(size_of(packed, 0) == packed_bytes(kind, out, in),
            "the packed bytes have not the size that kind and shape need");
    require(reinterpret_cast<uintptr_t>(packed.data()) % PACKED_ALIGNMENT == 0,
            "packed bytes must lie on a multiple of 64");
    return std::make_unique<Matrix>(kind, packed, out, in);
  }

  // XXH64 of parts of a run of bytes; the largest first, so that no thread is left with one.
  std::vector<uint64_t> checksums(Bytes data, Longs begins, Longs sizes) const {
    const long parts = size_of(begins, 0);
    require(size_of(sizes, 0) == parts, "one size per part");
    for (long i = 0; i < parts; ++i) {
      const long begin = begins.data()[i], size = sizes.data()[i];
      require(begin >= 0 && size >= 0 && size <= size_of(data, 0) - begin,
              "a part lies outside the bytes");
    }
    std::vector<long> order(parts);
    std::iota(order.begin(), order.end(), 0L);
    std::stable_sort(order.begin(), order.end(), [&](long a, long b) {
      return sizes.data()[a] > sizes.data()[b];
    });
    std::vector<uint64_t> sums(parts);
    without_gil([&](Pool& pool) {
      parallel(pool, parts, [&](long place, int) {
        const long i = order[place];
        sums[i] = Xxh64::of(data.data() + begins.data()[i], sizes.data()[i]);
      });
    });
    return sums;
  }

  void dequantize(const std::string& kind, Bytes data, OutRows result) const {
    const StoredRows rows = stored_rows(kind, data, size_of(result, 0), size_of(result, 1));
    without_gil([&](Pool& pool) { kernels_.dequantize(pool, rows, result.data()); });
  }

  void embed(const Matrix& table, Ints ids, OutRows result) const {
    const Packed& packed = table.packed();
    require(size_of(result, 0) == size_of(ids, 0), "one result row per id");
    require(size_of(result, 1) == packed.in, "result rows have not the table's width");
    require_indices(ids, packed.out, "token id");
    without_gil([&](Pool& pool) {
      kernels_.embed(pool, packed, ids.data(), size_of(ids, 0), result.data());
    });
  }

  void rms_norm(Rows x, Vector weight, float eps, OutRows result) const {
    const long rows = size_of(x, 0), columns = size_of(x, 1);
    require(size_of(weight, 0) == columns, "the norm's weight has not the rows' width");
    require(size_of(result, 0) == rows && size_of(result, 1) == columns, "result is not like x");
    without_gil([&](Pool& pool) {
      kernels_.rms_norm(pool, x.data(), weight.data(), eps, rows, columns, result.data());
    });
  }

  void linear(Rows x, const Matrix& weight, std::optional<Vector> bias,
              std::optional<Rows> residual, OutRows result) const {
    Product product = checked_product(x, weight, bias, result);
    if (residual) {
      require(size_of(*residual, 0) == size_of(result, 0) &&
                  size_of(*residual, 1) == size_of(result, 1),
              "residual is not like the result");
      product.residual = residual->data();
    }
    without_gil([&](Pool& pool) { kernels_.linear(pool, input(x), &product, 1); });
  }

  // Query, key and value projections of one input in one parallel loop.
  void linear3(Rows x, const Matrix& a, const Matrix& b, const Matrix& c,
               std::optional<Vector> bias_a, std::optional<Vector> bias_b,
               std::optional<Vector> bias_c, OutRows to_a, OutRows to_b, OutRows to_c) const {
    const Product products[] = {checked_product(x, a, bias_a, to_a),
                                checked_product(x, b, bias_b, to_b),
                                checked_product(x, c, bias_c, to_c)};
    without_gil([&](Pool& pool) { kernels_.linear(pool, input(x), products, 3); });
  }

  void gate_up_silu(Rows x, const Matrix& gate, const Matrix& up, std::optional<Vector> gate_bias,
                    std::optional<Vector> up_bias, OutRows result) const {
    const Product g = checked_product(x, gate, gate_bias, result);
    const Product u = checked_product(x, up, up_bias, result);
    without_gil([&](Pool& pool) { kernels_.gate_up_silu(pool, input(x), g, u); });
  }

  void rope_write(OutHeads query, OutHeads key, Heads value, std::optional<Vector> query_norm,
                  std::optional<Vector> key_norm, float norm_eps, Rows cos, Rows sin,
                  Ints positions, Longs write_at, const std::string& type, long block_size,
                  PageBytes bytes) const {
    const long tokens = size_of(query, 0), kv_heads = size_of(key, 1), dim = size_of(key, 2);
    const Pages pages = checked_pages(bytes, type, kv_heads, block_size, dim);
    require(dim % 2 == 0, "rotation needs an even head_dim");
    require(size_of(query, 2) == dim && size_of(value, 2) == dim,
            "query, key and value differ in head_dim");
    require(size_of(value, 1) == kv_heads, "key and value differ in kv_heads");
    require(size_of(key, 0) == tokens && size_of(value, 0) == tokens &&
                size_of(positions, 0) == tokens && size_of(write_at, 0) == tokens,
            "query, key, value, positions and write_at differ in tokens");
    require(size_of(cos, 1) == dim / 2 && size_of(sin, 1) == dim / 2 &&
                size_of(sin, 0) == size_of(cos, 0),
            "the rope table has not head_dim / 2 columns");
    require_indices(positions, size_of(cos, 0), "position");
    require_indices(write_at, size_of(bytes, 0) * block_size, "write_at");
    const RopeWrite args{query.data(),
                         key.data(),
                         value.data(),
                         data_or_null(query_norm, dim, "query norm has not head_dim weights"),
                         data_or_null(key_norm, dim, "key norm has not head_dim weights"),
                         norm_eps,
                         cos.data(),
                         sin.data(),
                         positions.data(),
                         write_at.data(),
                         tokens,
                         size_of(query, 1),
                         pages};
    without_gil([&](Pool& pool) { kernels_.rope_write(pool, args); });
  }

  void attention(Heads q, const std::string& type, long kv_heads, long block_size,
                 ReadPageBytes bytes, Ints positions, Ints chunk_starts, Ints context_lens,
                 IntTable page_table, float scale, std::optional<Vector> key_bias,
                 std::optional<Rows> cos, std::optional<Rows> sin, OutRows result) const {
    const long heads = size_of(q, 1), dim = size_of(q, 2);
    const Pages pages = checked_pages(bytes, type, kv_heads, block_size, dim);
    require(heads > 0 && heads % kv_heads == 0, "heads are no multiple of kv_heads");
    require(size_of(result, 0) == size_of(q, 0) && size_of(result, 1) == heads * dim,
            "result is not [tokens, heads * head_dim]");
    const std::vector<TokenBlock> blocks = token_blocks(
        batch_of(positions, chunk_starts, context_lens, page_table), size_of(q, 0),
        {block_size, size_of(bytes, 0)}, tokens_per_block(heads / kv_heads));
    const RotatedBias bias = checked_bias(key_bias, cos, sin, pages);
    if (bias.bias) require_indices(context_lens, bias.positions + 1, "context of");
    const Attention args{q.data(), result.data(), blocks.data(), (long)blocks.size(),
                         heads,    scale,         pages,         bias};
    without_gil([&](Pool& pool) {
      const long floats = kernels_.attention_scratch(args, pool.threads());
      kernels_.attention(pool, args, reinterpret_cast<float*>(scratch(floats * sizeof(float))));
    });
  }

  // A recorded program for one batch; `result` is [tokens or outputs, width of its result].
  void run(Recording& recording, Ints ids, Ints positions, Ints chunk_starts, Ints context_lens,
           IntTable page_table, Longs write_at, Ints output_rows, OutRows result) const {
    const Batch batch = batch_of(positions, chunk_starts, context_lens, page_table);
    const Step step = recording.checked(batch, indices(ids), {write_at.data(), write_at.size()},
                                        indices(output_rows), result);
    without_gil([&](Pool& pool) { recording.run(kernels_, pool, step, result.data()); });
  }

  // run() for one more token of each of `rows`, and sample() of all that it returns. Logits from
  // `known` on are padding.
  nb::list decode(Recording& recording, std::vector<int32_t> ids, std::vector<int32_t> rows,
                  std::vector<int32_t> positions, IntTable page_table, OutRows result,
                  nb::list samplers, long known) const {
    const Decode decode(std::move(ids), std::move(rows), std::move(positions), page_table,
                        recording.block_size());
    const Step step = decode.checked(recording, result);
    const Logits logits{result.data(), size_of(result, 0), size_of(result, 1)};
    const std::vector<Wanted> wanted =
        checked_rows(logits, samplers, decode.next(), std::nullopt);
    require(known > 0, "no token is known");
    std::vector<Chosen> chosen;
    without_gil([&](Pool& pool) {
      recording.run(kernels_, pool, step, result.data());
      for (long row = 0; row < logits.rows && known < logits.vocab; ++row) {
        float* begin = result.data() + row * logits.vocab;
        std::fill(begin + known, begin + logits.vocab, -std::numeric_limits<float>::infinity());
      }
      toque::sample(kernels_, pool, wanted, logits.vocab, chosen);
    });
    return to_python(chosen);
  }

  nb::list sample(Rows logits, nb::list samplers, std::vector<int64_t> positions,
                  nb::list masks) const {
    const long vocab = size_of(logits, 1);
    const std::vector<Wanted> rows =
        checked_rows({logits.data(), size_of(logits, 0), vocab}, samplers, positions, masks);
    std::vector<Chosen> chosen;
    without_gil([&](Pool& pool) { toque::sample(kernels_, pool, rows, vocab, chosen); });
    return to_python(chosen);
  }

  nb::list score(Rows logits, nb::list targets, long num_top) const {
    const std::vector<Token> tokens = checked_targets(logits, targets);
    std::vector<std::optional<Logprobs>> scores;
    without_gil([&](Pool& pool) {
      toque::score(kernels_, pool, logits.data(), size_of(logits, 1), tokens, num_top, scores);
    });
    return to_python(scores);
  }

 private:
  static Product checked_product(const Rows& x, const Matrix& weight,
                                 const std::optional<Vector>& bias, const OutRows& result) {
    const Packed& packed = weight.packed();
    require(size_of(x, 1) == packed.in, "x has not the weight's number of inputs");
    require(size_of(result, 0) == size_of(x, 0), "result has not x's number of rows");
    require(size_of(result, 1) == packed.out, "result has not the weight's number of outputs");
    return {packed, data_or_null(bias, packed.out, "bias has not the weight's number of outputs"),
            nullptr, result.data()};
  }

  // Belongs to the calling thread and only grows: fresh memory for each op would cost more page
  // faults than the ops of a small model cost time. One op at a time may use it.
  static uint8_t* scratch(long bytes) {
    thread_local ByteArray memory;
    thread_local long size = 0;
    if (bytes > size) {
      memory = allocate_bytes(bytes);
      size = bytes;
    }
    return memory.get();
  }

  static Input input(const Rows& x) {
    const long rows = size_of(x, 0), in = size_of(x, 1);
    return {x.data(), rows, in, scratch(input_scratch(rows, in))};
  }

  const Kernels& kernels_;
  std::shared_ptr<Pool> pool_;
};

using PackedView = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>, nb::c_contig>;

static void bind_matrix(nb::module_& module) {
  nb::class_<Matrix>(module, "Matrix")
      .def_prop_ro("shape", &Matrix::shape)
      .def_prop_ro("kind", &Matrix::kind)
      .def_prop_ro("nbytes", &Matrix::bytes)
      .def_prop_ro("packed", [](nb::handle_t<Matrix> self) {  // a view, which keeps the matrix alive
        const Matrix& matrix = nb::cast<const Matrix&>(self);
        return PackedView(matrix.packed().data, {matrix.bytes()}, self);
      });
}

static nb::tuple isas_here() {
  nb::list names;
  for (const Isa& isa : compiled_isas()) {
    if (isa.supported) names.append(isa.name());
  }
  return nb::tuple(names);
}

// nb::arg().noconvert() on every array: see check.h.
static void bind_backend(nb::module_& module) {
  const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
  const auto optional = [](const char* name) { return nb::arg(name).noconvert().none(); };
  nb::class_<Backend>(module, "Backend")
      .def(nb::init<int>(), "threads"_a)
      .def_prop_ro("isa", &Backend::isa)
      .def_prop_ro("threads", &Backend::threads)
      .def("set_threads", &Backend::set_threads, "threads"_a)
      .def("multiply_adds", &Backend::multiply_adds, "rounds"_a)
      .def("pack", &Backend::pack, "kind"_a, array("data"), "rows"_a, "columns"_a)
      .def("matrix_of", &Backend::matrix_of, "kind"_a, array("packed"), "out"_a, "in_"_a)
      .def("checksums", &Backend::checksums, array("data"), array("begins"), array("sizes"))
      .def("dequantize", &Backend::dequantize, "kind"_a, array("data"), array("result"))
      .def("embed", &Backend::embed, "table"_a, array("ids"), array("result"))
      .def("rms_norm", &Backend::rms_norm, array("x"), array("weight"), "eps"_a, array("result"))
      .def("linear", &Backend::linear, array("x"), "weight"_a, optional("bias"),
           optional("residual"), array("result"))
      .def("linear3", &Backend::linear3, array("x"), "a"_a, "b"_a, "c"_a, optional("bias_a"),
           optional("bias_b"), optional("bias_c"), array("to_a"), array("to_b"), array("to_c"))
      .def("gate_up_silu", &Backend::gate_up_silu, array("x"), "gate"_a, "up"_a,
           optional("gate_bias"), optional("up_bias"), array("result"))
      .def("rope_write", &Backend::rope_write, array("query"), array("key"), array("value"),
           optional("query_norm"), optional("key_norm"), "norm_eps"_a, array("cos"), array("sin"),
           array("positions"), array("write_at"), "type"_a, "block_size"_a, array("pages"))
      .def("attention", &Backend::attention, array("q"), "type"_a, "kv_heads"_a, "block_size"_a,
           array("pages"), array("positions"), array("chunk_starts"), array("context_lens"),
           array("page_table"), "scale"_a, optional("key_bias"), optional("cos"), optional("sin"),
           array("result"))
      .def("run", &Backend::run, "recording"_a, array("ids"), array("positions"),
           array("chunk_starts"), array("context_lens"), array("page_table"), array("write_at"),
           array("output_rows"), array("result"))
      .def("decode", &Backend::decode, "recording"_a, "ids"_a, "rows"_a, "positions"_a,
           array("page_table"), array("result"), "samplers"_a, "known"_a)
      .def("sample", &Backend::sample, array("logits"), "samplers"_a, "positions"_a, "masks"_a)
      .def("score", &Backend::score, array("logits"), "targets"_a, "num_top"_a);
}

}  // namespace toque

NB_MODULE(_native, module) {
  // An interpreter that exits does not free what its modules hold; nanobind would report that.
  nanobind::set_leak_warnings(false);
  module.attr("LAYOUT") = toque::LAYOUT;
  module.attr("ISAS") = toque::isas_here();
  toque::bind_matrix(module);
  toque::bind_program(module);
  toque::bind_sample(module);
  toque::bind_backend(module);
}
