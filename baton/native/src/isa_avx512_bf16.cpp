#include "vec_avx512.h"

#include "attend_bf16.h"

namespace baton {

const Kernels& avx512_bf16_bfloat16() {
  static const Kernels table = table_of<Bf16Panel, Bf16, attend_to<Pairs>>(dot_product<FromMemory<>>);
  return table;
}

}  // namespace baton
