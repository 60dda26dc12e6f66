#include "vec_avx512.h"

#include "attend.h"

namespace baton {

const Kernels& avx512_float32() {
  static const Kernels table = table_of<Float32Panel, float>(product<Float32Panel>);
  return table;
}

const Kernels& avx512_bfloat16() {
  static const Kernels table = table_of<Bf16Panel, float>(product<Bf16Panel>);
  return table;
}

}  // namespace baton
