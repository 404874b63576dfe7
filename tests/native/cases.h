// The native tests' parts: each draws problems and runs them with one instruction set, on one thread
// and on several, and compares with the portable one.
#pragma once

#include "drawn.h"
#include "pool.h"

namespace toque {

// Of pools that every case runs on.
struct Pools {
  Pool one{1};
  Pool three{3};
};

void check_products(const Kernels& kernels, Pools& pools, Draw& draw, Kind kind);
void check_group_sums(const Kernels& kernels, Pools& pools, Draw& draw);
void check_largest_sums(const Kernels& kernels, Pools& pools);
void check_rows(const Kernels& kernels, Pools& pools, Draw& draw);
void check_attention(const Kernels& kernels, Pools& pools, Draw& draw, KvType type);
void check_program(const Kernels& kernels, Pools& pools, Draw& draw, Kind kind, KvType type);
void check_sampler(const Kernels& kernels, Pools& pools, Draw& draw);

}  // namespace toque
