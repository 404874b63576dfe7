// The table of one instruction set's kernels.

#include "kernels.h"

namespace toque {
namespace TOQUE_ISA {

void dequantize(Pool&, const StoredRows&, float*);
void pack(Pool&, const StoredRows&, uint8_t*);
void embed(Pool&, const Packed&, const int32_t*, long, float*);
void rms_norm(Pool&, const float*, const float*, float, long, long, float*);
void linear(Pool&, const Input&, const Product*, int);
void gate_up_silu(Pool&, const Input&, const Product&, const Product&);
void rope_write(Pool&, const RopeWrite&);
void attention(Pool&, const Attention&, float*);
long scratch_floats(const Attention&, int);
bool block_maxima(const float*, long, float*);
double weigh(const float*, long, float, double, double*);
double multiply_adds(Pool&, long);

#define TOQUE_TEXT(name) TOQUE_TEXT_OF(name)
#define TOQUE_TEXT_OF(name) #name

extern const Kernels kernels{TOQUE_TEXT(TOQUE_ISA), dequantize, pack,         embed,
                             rms_norm,              linear,     gate_up_silu, rope_write,
                             attention,             scratch_floats, block_maxima, weigh,
                             multiply_adds};

}  // namespace TOQUE_ISA
}  // namespace toque
