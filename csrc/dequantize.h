// One row of packed weights to float32; see dequantize.cpp.
#pragma once

#include "kernels.h"

namespace toque {
namespace TOQUE_ISA {

void dequantize_row(Kind kind, const uint8_t* row, long columns, float* to);

}
}  // namespace toque
