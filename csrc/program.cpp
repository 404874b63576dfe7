#include "program.h"

#include <algorithm>
#include <cstring>

namespace toque {

// One pass over the list: where each value lies, and the batch.
struct Program::Run {
  Program& program;
  const Kernels& kernels;
  Pool& pool;
  const Step& step;
  float* result;

  float* at(Value value) const {
    if (value == NONE) return nullptr;
    if (value == program.result_) return result;
    return reinterpret_cast<float*>(program.slots_[program.values_[value].slot].memory.bytes.get());
  }
  long rows(Value value) const {
    return program.values_[value].per_output ? step.outputs : step.tokens;
  }
  Input input(Value x) const {
    const long in = program.width(x);
    return {at(x), rows(x), in, program.scratch_.at_least(input_scratch(rows(x), in))};
  }
};

// ------------------------------------------------------------------------------------ recording

Program::Value Program::add_value(long width, bool per_output) {
  values_.push_back({width, per_output});
  return static_cast<Value>(values_.size()) - 1;
}

Program::Value Program::add(std::initializer_list<Value> reads, std::vector<Value> writes,
                            Body body, Value in_place) {
  const int index = static_cast<int>(operations_.size());
  for (Value value : reads) {
    if (value != NONE) values_[value].last_use = index;
  }
  for (Value value : writes) values_[value].last_use = index;
  const Value first = writes.front();
  operations_.push_back({std::move(body), std::move(writes), in_place});
  return first;
}

Program::Value Program::embed(const Packed& table) {
  bounds_.ids = std::min<int64_t>(bounds_.ids, table.out);
  const Value to = add_value(table.in, false);
  return add({}, {to}, [=](Run& run) {
    run.kernels.embed(run.pool, table, run.step.ids, run.step.tokens, run.at(to));
  });
}

Program::Value Program::output_rows(Value x) {
  const long columns = width(x);
  const Value to = add_value(columns, true);
  return add({x}, {to}, [=](Run& run) {
    for (long i = 0; i < run.step.outputs; ++i) {
      std::memcpy(run.at(to) + i * columns, run.at(x) + run.step.output_rows[i] * columns,
                  columns * sizeof(float));
    }
  });
}

Program::Value Program::rms_norm(Value x, const float* weight, float eps) {
  const long columns = width(x);
  const Value to = add_value(columns, is_per_output(x));
  return add({x}, {to}, [=](Run& run) {
    run.kernels.rms_norm(run.pool, run.at(x), weight, eps, run.rows(x), columns, run.at(to));
  });
}

Program::Value Program::linear(Value x, const Projection& p, Value residual) {
  const Value to = add_value(p.weight.out, is_per_output(x));
  const auto body = [=](Run& run) {
    const Product product{p.weight, p.bias, run.at(residual), run.at(to)};
    run.kernels.linear(run.pool, run.input(x), &product, 1);
  };
  return add({x, residual}, {to}, body, residual);
}

Program::Value Program::gate_up_silu(Value x, const Projection& gate, const Projection& up) {
  const Value to = add_value(gate.weight.out, is_per_output(x));
  return add({x}, {to}, [=](Run& run) {
    const Product g{gate.weight, gate.bias, nullptr, run.at(to)};
    const Product u{up.weight, up.bias, nullptr, run.at(to)};
    run.kernels.gate_up_silu(run.pool, run.input(x), g, u);
  });
}

Program::Value Program::qkv_rope_write(Value x, const Projection (&qkv)[3], const RopeWrite& rope,
                                       long rope_positions, long num_pages) {
  bounds_.positions = std::min<int64_t>(bounds_.positions, rope_positions);
  bounds_.write_at = std::min<int64_t>(bounds_.write_at, num_pages * rope.pages.block_size);
  const Projection query = qkv[0], key = qkv[1], value = qkv[2];
  const Value q = add_value(query.weight.out, false);
  const Value k = add_value(key.weight.out, false);
  const Value v = add_value(value.weight.out, false);
  return add({x}, {q, k, v}, [=](Run& run) {
    const Product products[] = {{query.weight, query.bias, nullptr, run.at(q)},
                                {key.weight, key.bias, nullptr, run.at(k)},
                                {value.weight, value.bias, nullptr, run.at(v)}};
    run.kernels.linear(run.pool, run.input(x), products, 3);
    RopeWrite write = rope;
    write.query = run.at(q);
    write.key = run.at(k);
    write.value = run.at(v);
    write.positions = run.step.positions;
    write.write_at = run.step.write_at;
    write.tokens = run.step.tokens;
    run.kernels.rope_write(run.pool, write);
  });
}

Program::Value Program::attention(Value q, const Attention& fixed, long num_pages) {
  const Pages& pages = fixed.pages;
  const Paging paging{pages.block_size, num_pages,
                      tokens_per_block(fixed.heads / pages.kv_heads),
                      fixed.bias.bias ? fixed.bias.positions : 0};
  auto found = std::find(pagings_.begin(), pagings_.end(), paging);
  const long which = found - pagings_.begin();
  if (found == pagings_.end()) pagings_.push_back(paging);
  const Value to = add_value(fixed.heads * pages.dim, false);
  return add({q}, {to}, [=](Run& run) {
    const std::vector<TokenBlock>& blocks = run.step.blocks[which];
    Attention args = fixed;
    args.q = run.at(q);
    args.result = run.at(to);
    args.blocks = blocks.data();
    args.num_blocks = static_cast<long>(blocks.size());
    const long floats = run.kernels.attention_scratch(args, pool_threads(run.pool));
    uint8_t* scratch = run.program.scratch_.at_least(floats * static_cast<long>(sizeof(float)));
    run.kernels.attention(run.pool, args, reinterpret_cast<float*>(scratch));
  });
}

// ---------------------------------------------------------------------------------------- slots

int Program::take_slot(std::vector<int>& free) {
  if (free.empty()) {
    slots_.emplace_back();
    return static_cast<int>(slots_.size()) - 1;
  }
  const int slot = free.back();
  free.pop_back();
  return slot;
}

void Program::give_slot(Value value, int slot) {
  values_[value].slot = slot;
  long& width = values_[value].per_output ? slots_[slot].output_width : slots_[slot].token_width;
  width = std::max(width, values_[value].width);
}

void Program::finish(Value result) {
  result_ = result;
  std::vector<int> free;
  for (int i = 0; i < static_cast<int>(operations_.size()); ++i) {
    const Operation& operation = operations_[i];
    const Value under = operation.in_place;
    const bool handed_on = under != NONE && values_[under].last_use == i;
    for (Value value : operation.writes) {
      if (value == result) continue;  // lies where run() is told
      const bool here = handed_on && value == operation.writes.front();
      give_slot(value, here ? values_[under].slot : take_slot(free));
    }
    for (Value value = 0; value < static_cast<Value>(values_.size()); ++value) {
      const bool over = values_[value].slot != NONE && values_[value].last_use == i;
      if (over && !(handed_on && value == under)) free.push_back(values_[value].slot);
    }
  }
}

// -------------------------------------------------------------------------------------- running

uint8_t* Program::Memory::at_least(long wanted) {
  if (wanted > size) {
    bytes = allocate_bytes(wanted);
    size = wanted;
  }
  return bytes.get();
}

void Program::run(const Kernels& kernels, Pool& pool, const Step& step, float* result) {
  std::lock_guard<std::mutex> lock(one_at_a_time_);
  for (Slot& slot : slots_) {
    const long floats =
        std::max(step.tokens * slot.token_width, step.outputs * slot.output_width);
    slot.memory.at_least(floats * static_cast<long>(sizeof(float)));
  }
  Run run{*this, kernels, pool, step, result};
  for (const Operation& operation : operations_) operation.body(run);
}

}  // namespace toque
