// A Program as Python records it: checks widths once, and a batch's indices at each run.
#pragma once

#include "matrix.h"
#include "program.h"
#include "token_blocks.h"

namespace toque {

// Values are numbers that these functions return. Arrays and matrices that are handed over must stay
// alive as long as the recording: bind_program() ties them to it.
class Recording {
 public:
  using Value = Program::Value;
  using Bias = std::optional<Vector>;

  Value embed(const Matrix& table);
  Value output_rows(Value x);
  Value rms_norm(Value x, Vector weight, float eps);
  Value linear(Value x, const Matrix& weight, Bias bias, std::optional<Value> residual);
  Value gate_up_silu(Value x, const Matrix& gate, const Matrix& up, Bias gate_bias, Bias up_bias);
  Value qkv_rope_write(Value x, const Matrix& query, const Matrix& key, const Matrix& value,
                       Bias query_bias, Bias key_bias, Bias value_bias, Bias query_norm,
                       Bias key_norm, float norm_eps, Rows cos, Rows sin, const std::string& type,
                       long block_size, PageBytes bytes, long head_dim);
  Value attention(Value q, const std::string& type, long kv_heads, long block_size,
                  PageBytes bytes, long head_dim, float scale, Bias key_bias,
                  std::optional<Rows> cos, std::optional<Rows> sin);
  void finish(Value result);
  long width(Value value) const;
  bool is_per_output(Value value) const;

  // Throws what the ops themselves throw for such a batch.
  Step checked(const Batch& batch, Indices ids, std::span<const int64_t> write_at,
               Indices output_rows, const OutRows& result) const;
  // Tokens per page, the same in all layers.
  long block_size() const;
  void run(const Kernels& kernels, Pool& pool, const Step& step, float* result) {
    program_.run(kernels, pool, step, result);
  }

 private:
  void require_open() const;
  long per_token_width(Value value) const;
  Projection checked_projection(Value x, const Matrix& weight, const Bias& bias) const;

  Program program_;
};

void bind_program(nb::module_& module);

}  // namespace toque
