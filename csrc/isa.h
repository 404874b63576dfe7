// Which of the compiled instruction sets to use.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace toque {

#if defined(__aarch64__)
// The dot product of bytes, an option of ARMv8.2.
inline bool has_arm_dot() {
#if defined(__ARM_FEATURE_DOTPROD)
  return true;  // everything was compiled for such a processor
#elif defined(__linux__)
  constexpr unsigned long ASIMDDP = 1UL << 20;  // HWCAP_ASIMDDP, which old headers lack
  return (getauxval(AT_HWCAP) & ASIMDDP) != 0;
#else
  return false;
#endif
}
#endif

struct Isa {
  const Kernels* kernels;
  bool supported;     // by this machine
  const char* needs;  // what one has to have

  std::string name() const { return kernels->name; }
};

// All that were compiled, the best first.
inline std::vector<Isa> compiled_isas() {
  std::vector<Isa> all;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  all.push_back({&avx512::kernels, avx512, "AVX-512 (F, BW, VL, DQ) with VNNI"});
  all.push_back({&avx2::kernels, avx2, "AVX2, FMA and F16C"});
#elif defined(__aarch64__)
  all.push_back({&neon_dot::kernels, has_arm_dot(), "64-bit ARM with the dot product of bytes"});
  all.push_back({&neon::kernels, true, "64-bit ARM"});
#endif
  all.push_back({&portable::kernels, true, "nothing"});
  return all;
}

// The best that this machine has, or the one that the environment's TOQUE_ISA names. Throws
// std::invalid_argument if that is unknown or missing here: a benchmark or a test of one path must
// not measure another.
inline const Kernels& choose_kernels() {
  const char* wish = std::getenv("TOQUE_ISA");
  const std::string name = wish ? wish : "";
  std::string names;
  for (const Isa& isa : compiled_isas()) {
    if (name.empty() ? isa.supported : name == isa.name()) {
      if (isa.supported) return *isa.kernels;
      throw std::invalid_argument("TOQUE_ISA=" + name + ", but this machine has no " + isa.needs);
    }
    names += (names.empty() ? "" : ", ") + isa.name();
  }
  throw std::invalid_argument("TOQUE_ISA=" + name + " is unknown: use one of " + names);
}

}  // namespace toque
