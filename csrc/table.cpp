// The table of one instruction set's kernels.

#include "kernels.h"

namespace toque {
namespace TOQUE_ISA {

void dequantize(Pool&, const PackedRows&, float*);
void pack(Pool&, const PackedRows&, float*, float*);
void embed(Pool&, const Panels&, const int32_t*, long, float*);
void rms_norm(Pool&, const float*, const float*, float, long, long, float*);
void linear(Pool&, const float*, long, const Product*, int);
void gate_up_silu(Pool&, const float*, long, Panels, Panels, float*);
void rope_write(Pool&, const RopeWrite&);
void attention(Pool&, const Attention&, float*);
long scratch_floats(const Attention&);

#define TOQUE_TEXT(name) TOQUE_TEXT_OF(name)
#define TOQUE_TEXT_OF(name) #name

extern const Kernels kernels{TOQUE_TEXT(TOQUE_ISA), dequantize, pack,         embed,
                             rms_norm,              linear,     gate_up_silu, rope_write,
                             attention,             scratch_floats};

}  // namespace TOQUE_ISA
}  // namespace toque
