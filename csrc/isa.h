// Which of the compiled instruction sets to use.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace toque {

struct Isa {
  const Kernels* kernels;
  bool supported;
};

inline Isa avx2_here() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return {&avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                              __builtin_cpu_supports("f16c")};
#else
  return {nullptr, false};
#endif
}

// The best that this machine has, or the one that the environment's TOQUE_ISA names. Throws
// std::invalid_argument if that is unknown or missing here: a benchmark or a test of one path must
// not measure another.
inline const Kernels& choose_kernels() {
  const Isa avx2 = avx2_here();
  const char* wish = std::getenv("TOQUE_ISA");
  const std::string name = wish ? wish : "";
  if (name.empty()) return avx2.supported ? *avx2.kernels : portable::kernels;
  if (name == "portable") return portable::kernels;
  if (name != "avx2") {
    throw std::invalid_argument("TOQUE_ISA=" + name + " is unknown: use avx2 or portable");
  }
  if (!avx2.supported) {
    throw std::invalid_argument("TOQUE_ISA=avx2, but this machine has no AVX2, FMA and F16C");
  }
  return *avx2.kernels;
}

}  // namespace toque
