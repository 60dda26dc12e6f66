#include "cpu.h"
#include "kernels.h"

namespace baton {

const Kernels& kernels(Type weights) {
  const bool half = weights == kBfloat16;
  switch (selected_isa()) {
#if BATON_NEWEST_ISA >= 4
    case Isa::kAmx: return half ? amx_bfloat16() : avx512_float32();
#endif
#if BATON_NEWEST_ISA >= 3
    case Isa::kAvx512Bf16: return half ? avx512_bf16_bfloat16() : avx512_float32();
#endif
#if BATON_NEWEST_ISA >= 2
    case Isa::kAvx512: return half ? avx512_bfloat16() : avx512_float32();
#endif
#if BATON_NEWEST_ISA >= 1
    case Isa::kAvx2: return half ? avx2_bfloat16() : avx2_float32();
#endif
    default: return half ? scalar_bfloat16() : scalar_float32();
  }
}

}  // namespace baton
