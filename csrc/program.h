// A forward pass that was written down once and runs for one batch after another.
//
// Owns: the list of operations, the memory of what they hand on, their scratch. Knows: kernels and the
// widths of values. Does not know: layers, Python, whether pointers stay valid (bind_program.cpp).
//
// A value is a float32 matrix that an operation writes and later ones read. Its number of rows is
// symbolic, the tokens or the outputs of a batch, its width is fixed. finish() gives values their
// slots: one lives from the operation that writes it to the last that reads it, and leaves its
// slot to later ones. What a residual is added to lies in the residual's own slot where nobody
// needs the residual afterwards.
//
//     embed      -> v0                   v0 in slot 0
//     rms_norm v0 -> v1                  v1 in slot 1
//     qkv      v1 -> v2 (v3, v4)         v2, v3, v4 in slots 2, 3, 4
//     attention v2 -> v5                 v5 in slot 1
//     linear   v5 + v0 -> v6             v6 in slot 0, where v0 was
#pragma once

#include <functional>
#include <mutex>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace toque {

// What attention needs to cut a batch into blocks of tokens; layers mostly agree on it.
struct Paging {
  long block_size;
  long pages;
  long block_tokens;
  long positions;  // of the rope table of a bias that pages leave out; 0 = there is none
  bool operator==(const Paging&) const = default;
};

// A batch whose indices have been checked.
struct Step {
  const int32_t* ids;
  const int32_t* positions;
  const int64_t* write_at;
  const int32_t* output_rows;
  long tokens;
  long outputs;
  std::vector<std::vector<TokenBlock>> blocks;  // one list for each of Program::pagings()
};

struct Projection {
  Packed weight;
  const float* bias;  // [out] or null
};

class Program {
 public:
  Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  using Value = int;
  static constexpr Value NONE = -1;

  // Bounds of the indices in a batch, exclusive; the smallest of all operations that follow them.
  struct Bounds {
    int64_t ids = INT64_MAX;
    int64_t positions = INT64_MAX;
    int64_t write_at = INT64_MAX;
  };

  // Recording, in the order in which to run. Widths have been checked. Returns what is written.
  Value embed(const Packed& table);
  Value output_rows(Value x);
  Value rms_norm(Value x, const float* weight, float eps);
  Value linear(Value x, const Projection& p, Value residual);
  Value gate_up_silu(Value x, const Projection& gate, const Projection& up);
  // `rope` with all but what is written and what a batch brings; num_pages as of its pages.
  Value qkv_rope_write(Value x, const Projection (&qkv)[3], const RopeWrite& rope,
                       long rope_positions, long num_pages);
  Value attention(Value q, const Attention& fixed, long num_pages);
  void finish(Value result);

  bool finished() const { return result_ != NONE; }
  long values() const { return static_cast<long>(values_.size()); }
  long width(Value value) const { return values_.at(value).width; }
  bool is_per_output(Value value) const { return values_.at(value).per_output; }
  Value result() const { return result_; }
  const Bounds& bounds() const { return bounds_; }
  const std::vector<Paging>& pagings() const { return pagings_; }

  // Writes the result, [tokens or outputs, width]. From several threads: one after the other.
  void run(const Kernels& kernels, Pool& pool, const Step& step, float* result);

 private:
  struct Run;
  using Body = std::function<void(Run&)>;

  struct ValueInfo {
    long width;
    bool per_output;
    int slot = NONE;
    int last_use = NONE;  // index of an operation
  };

  struct Operation {
    Body body;
    std::vector<Value> writes;
    Value in_place = NONE;  // may be overwritten by the first of `writes`, which is like it
  };

  struct Memory {
    ByteArray bytes;
    long size = 0;
    uint8_t* at_least(long wanted);  // grows only: its content is lost then
  };

  struct Slot {
    long token_width = 0;   // the widest value of either kind that ever lies here
    long output_width = 0;
    Memory memory;
  };

  Value add_value(long width, bool per_output);
  Value add(std::initializer_list<Value> reads, std::vector<Value> writes, Body body,
            Value in_place = NONE);
  int take_slot(std::vector<int>& free);
  void give_slot(Value value, int slot);

  std::vector<ValueInfo> values_;
  std::vector<Operation> operations_;
  std::vector<Paging> pagings_;
  std::vector<Slot> slots_;
  Memory scratch_;  // of one operation at a time
  Bounds bounds_;
  Value result_ = NONE;
  std::mutex one_at_a_time_;
};

}  // namespace toque
