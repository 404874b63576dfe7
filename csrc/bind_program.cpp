#include "bind_program.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

namespace toque {

using namespace nb::literals;

void Recording::require_open() const {
  require(!program_.finished(), "the recording is finished");
}

long Recording::width(Value value) const {
  require(value >= 0 && value < program_.values(), "no such value");
  return program_.width(value);
}

bool Recording::is_per_output(Value value) const {
  width(value);
  return program_.is_per_output(value);
}

// Of a value that keys, positions and pages belong to.
long Recording::per_token_width(Value value) const {
  require(!is_per_output(value), "attention needs a row for every token");
  return width(value);
}

Projection Recording::checked_projection(Value x, const Matrix& weight, const Bias& bias) const {
  require_open();
  const Packed& packed = weight.packed();
  require(width(x) == packed.in, "x has not the weight's number of inputs");
  return {packed, data_or_null(bias, packed.out, "bias has not the weight's number of outputs")};
}

Program::Value Recording::embed(const Matrix& table) {
  require_open();
  return program_.embed(table.packed());
}

Program::Value Recording::output_rows(Value x) {
  require_open();
  per_token_width(x);
  return program_.output_rows(x);
}

Program::Value Recording::rms_norm(Value x, Vector weight, float eps) {
  require_open();
  require(size_of(weight, 0) == width(x), "the norm's weight has not the rows' width");
  return program_.rms_norm(x, weight.data(), eps);
}

Program::Value Recording::linear(Value x, const Matrix& weight, Bias bias,
                                 std::optional<Value> residual) {
  const Projection projection = checked_projection(x, weight, bias);
  if (residual) {
    require(width(*residual) == projection.weight.out &&
                is_per_output(*residual) == is_per_output(x),
            "residual is not like the result");
  }
  return program_.linear(x, projection, residual.value_or(Program::NONE));
}

Program::Value Recording::gate_up_silu(Value x, const Matrix& gate, const Matrix& up,
                                       Bias gate_bias, Bias up_bias) {
  const Projection g = checked_projection(x, gate, gate_bias);
  const Projection u = checked_projection(x, up, up_bias);
  require(g.weight.out == u.weight.out, "gate and up differ in outputs");
  return program_.gate_up_silu(x, g, u);
}

Program::Value Recording::qkv_rope_write(Value x, const Matrix& query, const Matrix& key,
                                         const Matrix& value, Bias query_bias, Bias key_bias,
                                         Bias value_bias, Bias query_norm, Bias key_norm,
                                         float norm_eps, Rows cos, Rows sin,
                                         const std::string& type, long block_size,
                                         PageBytes bytes, long head_dim) {
  per_token_width(x);
  const Projection qkv[] = {checked_projection(x, query, query_bias),
                            checked_projection(x, key, key_bias),
                            checked_projection(x, value, value_bias)};
  require(head_dim > 0 && head_dim % 2 == 0, "rotation needs an even head_dim");
  const long kv_width = qkv[1].weight.out, query_width = qkv[0].weight.out;
  require(query_width % head_dim == 0 && kv_width % head_dim == 0, "outputs are not whole heads");
  require(qkv[2].weight.out == kv_width, "key and value differ in kv_heads");
  const Pages pages = checked_pages(bytes, type, kv_width / head_dim, block_size, head_dim);
  require(size_of(cos, 1) == head_dim / 2 && size_of(sin, 1) == head_dim / 2 &&
              size_of(sin, 0) == size_of(cos, 0),
          "the rope table has not head_dim / 2 columns");
  RopeWrite rope{};
  rope.query_norm = data_or_null(query_norm, head_dim, "query norm has not head_dim weights");
  rope.key_norm = data_or_null(key_norm, head_dim, "key norm has not head_dim weights");
  rope.norm_eps = norm_eps;
  rope.cos = cos.data();
  rope.sin = sin.data();
  rope.heads = query_width / head_dim;
  rope.pages = pages;
  return program_.qkv_rope_write(x, qkv, rope, size_of(cos, 0), size_of(bytes, 0));
}

Program::Value Recording::attention(Value q, const std::string& type, long kv_heads,
                                    long block_size, PageBytes bytes, long head_dim, float scale,
                                    Bias key_bias, std::optional<Rows> cos,
                                    std::optional<Rows> sin) {
  require_open();
  const Pages pages = checked_pages(bytes, type, kv_heads, block_size, head_dim);
  const long heads = per_token_width(q) / head_dim;
  require(heads * head_dim == width(q) && heads > 0 && heads % kv_heads == 0,
          "heads are no multiple of kv_heads");
  Attention fixed{};
  fixed.heads = heads;
  fixed.scale = scale;
  fixed.pages = pages;
  fixed.bias = checked_bias(key_bias, cos, sin, pages);
  return program_.attention(q, fixed, size_of(bytes, 0));
}

void Recording::finish(Value result) {
  require_open();
  width(result);
  program_.finish(result);
}

Step Recording::checked(const Batch& batch, Indices ids, std::span<const int64_t> write_at,
                        Indices output_rows, const OutRows& result) const {
  require(program_.finished(), "the recording is not finished");
  const long tokens = ids.size(), outputs = output_rows.size();
  require(batch.positions.size() == ids.size() && write_at.size() == ids.size(),
          "ids, positions and write_at differ in tokens");
  require_indices(ids, program_.bounds().ids, "token id");
  require_indices(batch.positions, program_.bounds().positions, "position");
  require_indices(write_at, program_.bounds().write_at, "write_at");
  require_indices(output_rows, tokens, "output row");
  const Value end = program_.result();
  require(size_of(result, 0) == (is_per_output(end) ? outputs : tokens) &&
              size_of(result, 1) == width(end),
          "result has not the shape of what the recording returns");
  Step step{ids.data(), batch.positions.data(), write_at.data(), output_rows.data(), tokens,
            outputs,    {}};
  for (const Paging& paging : program_.pagings()) {
    step.blocks.push_back(token_blocks(batch, tokens, {paging.block_size, paging.pages},
                                       paging.block_tokens));
    if (paging.positions) require_indices(batch.context_lens, paging.positions + 1, "context of");
  }
  return step;
}

long Recording::block_size() const {
  const std::vector<Paging>& pagings = program_.pagings();
  require(!pagings.empty(), "the recording has no pages");
  const long size = pagings.front().block_size;
  for (const Paging& paging : pagings) require(paging.block_size == size, "pages differ in tokens");
  return size;
}

// The object given as argument I (1 is the recording itself) lives as long as the recording.
template <size_t I>
using Kept = nb::keep_alive<1, I>;

void bind_program(nb::module_& module) {
  const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
  const auto optional = [](const char* name) { return nb::arg(name).noconvert().none(); };
  nb::class_<Recording>(module, "Recording")
      .def(nb::init<>())
      .def("embed", &Recording::embed, "table"_a, Kept<2>())
      .def("output_rows", &Recording::output_rows, "x"_a)
      .def("rms_norm", &Recording::rms_norm, "x"_a, array("weight"), "eps"_a, Kept<3>())
      .def("linear", &Recording::linear, "x"_a, "weight"_a, optional("bias"),
           nb::arg("residual").none(), Kept<3>(), Kept<4>())
      .def("gate_up_silu", &Recording::gate_up_silu, "x"_a, "gate"_a, "up"_a,
           optional("gate_bias"), optional("up_bias"), Kept<3>(), Kept<4>(), Kept<5>(), Kept<6>())
      .def("qkv_rope_write", &Recording::qkv_rope_write, "x"_a, "query"_a, "key"_a, "value"_a,
           optional("query_bias"), optional("key_bias"), optional("value_bias"),
           optional("query_norm"), optional("key_norm"), "norm_eps"_a, array("cos"), array("sin"),
           "type"_a, "block_size"_a, array("pages"), "head_dim"_a, Kept<3>(), Kept<4>(), Kept<5>(),
           Kept<6>(), Kept<7>(), Kept<8>(), Kept<9>(), Kept<10>(), Kept<12>(),
           Kept<13>(), Kept<16>())
      .def("attention", &Recording::attention, "q"_a, "type"_a, "kv_heads"_a, "block_size"_a,
           array("pages"), "head_dim"_a, "scale"_a, optional("key_bias"), optional("cos"),
           optional("sin"), Kept<6>(), Kept<9>(), Kept<10>(), Kept<11>())
      .def("finish", &Recording::finish, "result"_a)
      .def("width", &Recording::width, "value"_a)
      .def("is_per_output", &Recording::is_per_output, "value"_a);
}

}  // namespace toque
