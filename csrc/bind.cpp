// The Python module toque.kernels.cpu._native: checks arguments, lets go of the GIL, calls kernels.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "check.h"
#include "isa.h"
#include "memory.h"
#include "pool.h"
#include "token_blocks.h"

namespace toque {

using namespace nb::literals;

// The names of Kind's values, in its order.
constexpr const char* KIND_NAMES[] = {"F32",  "F16",  "BF16", "Q4_0", "Q4_1", "Q5_0",
                                      "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"};

static PackedRows packed_rows(const std::string& name, const Bytes& data, long rows, long columns) {
  const auto found = std::find(std::begin(KIND_NAMES), std::end(KIND_NAMES), name);
  require(found != std::end(KIND_NAMES), "unknown tensor kind");
  const Kind kind = static_cast<Kind>(found - std::begin(KIND_NAMES));
  const BlockSize size = block_size(kind);
  require(rows > 0 && columns > 0, "a matrix must not be empty");
  require(columns % size.values == 0, "rows are not whole blocks");
  require(size_of(data, 0) / rows == columns / size.values * size.bytes &&
              size_of(data, 0) % rows == 0,
          "data has not the size that its kind and shape need");
  return {kind, data.data(), rows, columns};
}

// A weight matrix in panels. Immutable once made.
class Matrix {
 public:
  Matrix(long out, long in) : out_(out), in_(in), floats_(allocate_floats(size())) {}
  Panels panels() const { return {floats_.get(), out_, in_}; }
  float* data() { return floats_.get(); }
  size_t bytes() const { return size() * sizeof(float); }
  nb::tuple shape() const { return nb::make_tuple(out_, in_); }

 private:
  size_t size() const { return static_cast<size_t>(panels_for(out_)) * PANEL * in_; }

  long out_, in_;
  FloatArray floats_;
};

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

  // Calls that run in other threads go on with the pool they began with.
  void set_threads(int threads) {
    require(threads >= 1 && threads <= 1024, "threads must be in 1..1024");
    pool_ = std::make_shared<Pool>(threads);
  }

  std::unique_ptr<Matrix> pack(const std::string& kind, Bytes data, long out, long in) const {
    const PackedRows rows = packed_rows(kind, data, out, in);
    return without_gil([&](Pool& pool) {
      auto matrix = std::make_unique<Matrix>(out, in);
      const FloatArray scratch = allocate_floats(pool.threads() * pack_scratch(in));
      kernels_.pack(pool, rows, matrix->data(), scratch.get());
      return matrix;
    });
  }

  void dequantize(const std::string& kind, Bytes data, OutRows result) const {
    const PackedRows rows = packed_rows(kind, data, size_of(result, 0), size_of(result, 1));
    without_gil([&](Pool& pool) { kernels_.dequantize(pool, rows, result.data()); });
  }

  void embed(const Matrix& table, Ints ids, OutRows result) const {
    const Panels panels = table.panels();
    require(size_of(result, 0) == size_of(ids, 0), "one result row per id");
    require(size_of(result, 1) == panels.in, "result rows have not the table's width");
    require_indices(ids, panels.out, "token id");
    without_gil([&](Pool& pool) {
      kernels_.embed(pool, panels, ids.data(), size_of(ids, 0), result.data());
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
    without_gil([&](Pool& pool) { kernels_.linear(pool, x.data(), size_of(x, 0), &product, 1); });
  }

  // Query, key and value projections of one input in one parallel loop.
  void linear3(Rows x, const Matrix& a, const Matrix& b, const Matrix& c,
               std::optional<Vector> bias_a, std::optional<Vector> bias_b,
               std::optional<Vector> bias_c, OutRows to_a, OutRows to_b, OutRows to_c) const {
    const Product products[] = {checked_product(x, a, bias_a, to_a),
                                checked_product(x, b, bias_b, to_b),
                                checked_product(x, c, bias_c, to_c)};
    without_gil([&](Pool& pool) { kernels_.linear(pool, x.data(), size_of(x, 0), products, 3); });
  }

  void gate_up_silu(Rows x, const Matrix& gate, const Matrix& up, OutRows result) const {
    const Product g = checked_product(x, gate, std::nullopt, result);
    const Product u = checked_product(x, up, std::nullopt, result);
    without_gil([&](Pool& pool) {
      kernels_.gate_up_silu(pool, x.data(), size_of(x, 0), g.weight, u.weight, result.data());
    });
  }

  void rope_write(OutHeads query, OutHeads key, Heads value, std::optional<Vector> query_norm,
                  std::optional<Vector> key_norm, float norm_eps, Rows cos, Rows sin,
                  Ints positions, Longs write_at, PageArray keys, PageArray values) const {
    const Pages pages = checked_pages(keys, values);
    const long tokens = size_of(query, 0), dim = pages.dim;
    require(dim % 2 == 0, "rotation needs an even head_dim");
    require(size_of(query, 2) == dim && size_of(key, 2) == dim && size_of(value, 2) == dim,
            "query, key or value have not the pages' head_dim");
    require(size_of(key, 1) == pages.kv_heads && size_of(value, 1) == pages.kv_heads,
            "key or value have not the pages' kv_heads");
    require(size_of(key, 0) == tokens && size_of(value, 0) == tokens &&
                size_of(positions, 0) == tokens && size_of(write_at, 0) == tokens,
            "query, key, value, positions and write_at differ in tokens");
    require(size_of(cos, 1) == dim / 2 && size_of(sin, 1) == dim / 2 &&
                size_of(sin, 0) == size_of(cos, 0),
            "the rope table has not head_dim / 2 columns");
    require_indices(positions, size_of(cos, 0), "position");
    require_indices(write_at, size_of(keys, 0) * pages.block_size, "write_at");
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

  void attention(Heads q, ReadPageArray keys, ReadPageArray values, Ints positions,
                 Ints chunk_starts, Ints context_lens, IntTable page_table, float scale,
                 OutRows result) const {
    const Pages pages = checked_pages(keys, values);
    const long heads = size_of(q, 1);
    require(size_of(q, 2) == pages.dim, "q has not the pages' head_dim");
    require(heads > 0 && heads % pages.kv_heads == 0, "heads are no multiple of kv_heads");
    require(size_of(result, 0) == size_of(q, 0) && size_of(result, 1) == heads * pages.dim,
            "result is not [tokens, heads * head_dim]");
    const std::vector<TokenBlock> blocks = token_blocks(
        {positions, chunk_starts, context_lens, page_table}, size_of(q, 0),
        {pages.block_size, size_of(keys, 0)}, tokens_per_block(heads / pages.kv_heads));
    const Attention args{q.data(),       result.data(), blocks.data(), (long)blocks.size(),
                         heads,          scale,         pages};
    without_gil([&](Pool& pool) {
      const long floats = kernels_.attention_scratch(args);
      const FloatArray scratch = allocate_floats(pool.threads() * floats);
      kernels_.attention(pool, args, scratch.get());
    });
  }

 private:
  static Product checked_product(const Rows& x, const Matrix& weight,
                                 const std::optional<Vector>& bias, const OutRows& result) {
    const Panels panels = weight.panels();
    require(size_of(x, 1) == panels.in, "x has not the weight's number of inputs");
    require(size_of(result, 0) == size_of(x, 0), "result has not x's number of rows");
    require(size_of(result, 1) == panels.out, "result has not the weight's number of outputs");
    return {panels, data_or_null(bias, panels.out, "bias has not the weight's number of outputs"),
            nullptr, result.data()};
  }

  const Kernels& kernels_;
  std::shared_ptr<Pool> pool_;
};

static void bind_matrix(nb::module_& module) {
  nb::class_<Matrix>(module, "Matrix")
      .def_prop_ro("shape", &Matrix::shape)
      .def_prop_ro("nbytes", &Matrix::bytes);
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
      .def("pack", &Backend::pack, "kind"_a, array("data"), "rows"_a, "columns"_a)
      .def("dequantize", &Backend::dequantize, "kind"_a, array("data"), array("result"))
      .def("embed", &Backend::embed, "table"_a, array("ids"), array("result"))
      .def("rms_norm", &Backend::rms_norm, array("x"), array("weight"), "eps"_a, array("result"))
      .def("linear", &Backend::linear, array("x"), "weight"_a, optional("bias"),
           optional("residual"), array("result"))
      .def("linear3", &Backend::linear3, array("x"), "a"_a, "b"_a, "c"_a, optional("bias_a"),
           optional("bias_b"), optional("bias_c"), array("to_a"), array("to_b"), array("to_c"))
      .def("gate_up_silu", &Backend::gate_up_silu, array("x"), "gate"_a, "up"_a, array("result"))
      .def("rope_write", &Backend::rope_write, array("query"), array("key"), array("value"),
           optional("query_norm"), optional("key_norm"), "norm_eps"_a, array("cos"), array("sin"),
           array("positions"), array("write_at"), array("keys"), array("values"))
      .def("attention", &Backend::attention, array("q"), array("keys"), array("values"),
           array("positions"), array("chunk_starts"), array("context_lens"), array("page_table"),
           "scale"_a, array("result"));
}

}  // namespace toque

NB_MODULE(_native, module) {
  // An interpreter that exits does not free what its modules hold; nanobind would report that.
  nanobind::set_leak_warnings(false);
  toque::bind_matrix(module);
  toque::bind_backend(module);
}
